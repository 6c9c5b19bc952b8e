// See shapes.h.
#include "shapes.h"

#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace late {
namespace {

using c10::IValue;

at::Tensor shape_of(const at::Tensor& tensor) {
  // A host's number stays a number: kernels take it by value, and meta kernels require it.
  if (!ours(tensor) && !tensor.dim()) return tensor;
  return with_number(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)), tensor);
}

// All inputs of a call that its shapes depend on, as bytes.
class Key {
 public:
  template <class T>
  void add(const T& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void add(c10::IntArrayRef values) {
    add(values.size());
    for (int64_t value : values) add(value);
  }
  void add(const at::Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    add(tensor.scalar_type());
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add(tensor.sizes());
    add(tensor.strides());
    bool number = !ours(tensor) && !tensor.dim();
    add(number);
    if (number) text.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
  }
  // Returns false for a value that cannot be turned into bytes.
  bool add_value(const IValue& value) {
    add(value.tagKind().size());
    text += value.tagKind();
    if (value.isNone()) return true;
    if (value.isTensor()) return add(value.toTensor()), true;
    if (value.isInt()) return add(value.toInt()), true;
    if (value.isDouble()) return add(value.toDouble()), true;
    if (value.isBool()) return add(value.toBool()), true;
    if (value.isString()) return text += value.toStringRef(), true;
    if (value.isDevice()) return add(value.toDevice().type()), true;
    if (value.isIntList()) return add(c10::IntArrayRef(value.toIntVector())), true;
    if (value.isTensorList() || value.isOptionalTensorList() || value.isBoolList()) {
      auto list = value.toListRef();
      add(list.size());
      for (const IValue& element : list)
        if (!add_value(element)) return false;
      return true;
    }
    return false;
  }

  std::string text;
};

bool writes_out(const c10::FunctionSchema& schema) {
  for (auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return true;
  return false;
}

// Many meta kernels are in Python (torch/_refs, torch/_meta_registrations.py), and a run repeats the same calls.
std::mutex mutex;
std::unordered_map<std::string, Shapes> cache;

}  // namespace

at::Tensor with_number(at::Tensor tensor, const at::Tensor& of) {
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

IValue changed(const IValue& value, const Change& change, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) return device;
  return value;
}

Values all_changed(const Values& values, const Change& change, c10::Device device) {
  Values results;
  for (auto& value : values) results.push_back(changed(value, change, device));
  return results;
}

std::optional<Shapes> shapes_of(const c10::OperatorHandle& op, const Values& arguments) {
  if (op.schema().arguments().empty() || op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return std::nullopt;
  Key key;
  key.text = toString(op.operator_name());
  // Integers may become floating-point numbers of the default type.
  key.add(c10::get_default_dtype_as_scalartype());
  bool is_cacheable = true;
  for (size_t i = 0; is_cacheable && i < arguments.size(); ++i) is_cacheable = key.add_value(arguments[i]);
  if (is_cacheable) {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto entry = cache.find(key.text); entry != cache.end()) return entry->second;
  }
  Values shapes = all_changed(arguments, shape_of, at::kMeta);
  torch::jit::Stack stack(shapes);
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  Shapes inferred{std::move(stack), writes_out(op.schema()) ? std::move(shapes) : Values()};
  if (is_cacheable) {
    std::lock_guard<std::mutex> lock(mutex);
    cache.emplace(key.text, inferred);
  }
  return inferred;
}

}  // namespace late
