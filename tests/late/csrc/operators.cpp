// Operators of torch on late devices: shapes are computed at once by the meta kernels, values later by the CPU kernels on raw addresses.
//
// An operator without a meta kernel, or with a result whose size depends on values, waits for its stream and runs at once, as
// torch.nonzero does on CUDA ("forced"). Random numbers are drawn when an operator is issued, see `draw_now`.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "allocator.h"
#include "current.h"
#include "locked.h"
#include "machine.h"
#include "shapes.h"

namespace late {
namespace {

using c10::IValue;

c10::Device here() { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device())}; }

// A tensor on the same memory that does not keep it alive: a kernel's view of an argument.
at::Tensor raw(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  TORCH_CHECK(tensor.storage().nbytes(), "late: a tensor is used whose storage is empty");
  return with_number(at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options), tensor);
}

// A deferred kernel reads a host's tensor as it was when the kernel was issued.
at::Tensor kernel_argument(const at::Tensor& tensor) { return ours(tensor) ? raw(tensor) : with_number(tensor.clone(), tensor); }

at::Tensor like(const at::Tensor& shape) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(here()));
}

// The index of the argument that a result aliases; -1 for a new tensor.
int argument_of(const c10::FunctionSchema& schema, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (!alias) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* own = schema.arguments()[i].alias_info();
    if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
  }
  TORCH_CHECK(false, "late: a view that is not made by as_strided: ", schema.operator_name());
}

// out= tensors take the size of the result, as in resize_output.
void resize_outputs(const c10::FunctionSchema& schema, const Values& arguments, const Values& shapes) {
  for (size_t i = 0; i < shapes.size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !arguments[i].isTensor() || !ours(arguments[i].toTensor())) continue;
    auto shape = shapes[i].toTensor();
    if (arguments[i].toTensor().sizes() != shape.sizes()) arguments[i].toTensor().resize_(shape.sizes());
  }
}

// New tensors for results of given shapes, each with the tensor that the kernel writes into.
using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

IValue allocated(const IValue& shape, Pairs& pairs) {
  auto allocate = [&](const at::Tensor& tensor) {
    auto tensor_on_device = like(tensor);
    pairs.emplace_back(raw(tensor_on_device), at::Tensor());
    return tensor_on_device;
  };
  return changed(shape, allocate, here());
}

void gather(const IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
}

class BelowAutograd {
  c10::impl::ForceDispatchKeyGuard clean_{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  at::AutoDispatchBelowADInplaceOrView below_;
};

// Run the CPU kernel, and copy its new results to their destination.
void compute(const c10::OperatorHandle& op, const Values& arguments, const std::vector<size_t>& fresh, const std::vector<at::Tensor>& into) {
  BelowAutograd below;
  torch::jit::Stack stack(arguments);
  op.callBoxed(&stack);
  std::vector<at::Tensor> outputs;
  for (size_t result : fresh) gather(stack[result], outputs);
  TORCH_CHECK(outputs.size() == into.size(), "late: ", op.operator_name(), " outputs ", outputs.size(), " tensors, its shapes say ", into.size());
  for (size_t i = 0; i < outputs.size(); ++i) const_cast<at::Tensor&>(into[i]).copy_(outputs[i]);
}

bool draws(const c10::OperatorHandle& op) {
  for (auto tag : op.getTags())
    if (tag == at::Tag::nondeterministic_seeded) return true;
  return false;
}

// The argument that is filled with random numbers, if they depend on nothing but its shape; otherwise -1.
int drawn_into(const c10::FunctionSchema& schema, const Values& arguments) {
  int filled = -1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::vector<at::Tensor> tensors;
    gather(arguments[i], tensors);
    if (tensors.empty()) continue;
    auto* alias = schema.arguments()[i].alias_info();
    if (filled >= 0 || !alias || !alias->isWrite() || !arguments[i].isTensor()) return -1;
    filled = static_cast<int>(i);
  }
  return filled;
}

Operation later(std::string label, std::function<void()> run) {
  Operation operation;
  operation.label = std::move(label);
  operation.run = std::move(run);
  return operation;
}

void issue_here(Operation operation) { Machine::get().issue(current_device(), current_stream(current_device()), std::move(operation)); }

c10::Device device_of(const Values& arguments) {
  for (auto& argument : arguments) {
    std::vector<at::Tensor> tensors;
    gather(argument, tensors);
    for (auto& tensor : tensors)
      if (ours(tensor)) return tensor.device();
    if (argument.isDevice() && argument.toDevice().is_privateuseone() && argument.toDevice().has_index()) return argument.toDevice();
  }
  return here();
}

void forced(const c10::OperatorHandle& op, const Values& kernel, const std::vector<size_t>& fresh, Values& results) {
  auto& machine = Machine::get();
  ++machine.counts["forced"];
  ++machine.counts["forced " + toString(op.operator_name())];
  machine.wait_stream(current_device(), current_stream(current_device()));
  BelowAutograd below;
  torch::jit::Stack stack(kernel);
  op.callBoxed(&stack);
  for (size_t result : fresh) {
    Pairs pairs;
    results[result] = allocated(stack[result], pairs);
    std::vector<at::Tensor> outputs;
    gather(stack[result], outputs);
    for (size_t i = 0; i < outputs.size(); ++i) pairs[i].first.copy_(outputs[i]);
  }
}

// Whether the sizes of an operator's results depend on the values of its arguments.
bool sizes_depend_on_values(const c10::OperatorHandle& op) {
  for (auto tag : op.getTags())
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) return true;
  return false;
}

// The results of the CPU kernel for zeros of the same shapes: in a capture, in which nothing may run, they give the shapes of an operator
// without a meta kernel.
Values results_for_zeros(const c10::OperatorHandle& op, const Values& arguments) {
  auto zeros = [](const at::Tensor& tensor) {
    return with_number(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_(), tensor);
  };
  BelowAutograd below;
  torch::jit::Stack stack(all_changed(arguments, zeros, at::kCPU));
  op.callBoxed(&stack);
  return stack;
}

// Draw the numbers now with the host's generator, and write them when the device gets there. As on CUDA, where the generator's state at
// the issue fixes them (CUDAGeneratorImpl::philox_cuda_state), they do not depend on when that is.
void draw_now(const c10::OperatorHandle& op, const Values& arguments, size_t filled) {
  auto into = arguments[filled].toTensor();
  auto numbers = at::empty_strided(into.sizes(), into.strides(), into.options().device(at::kCPU));
  Values kernel = arguments;
  kernel[filled] = numbers;
  {
    BelowAutograd below;
    torch::jit::Stack stack(kernel);
    op.callBoxed(&stack);
  }
  auto operation = later(toString(op.operator_name()), [numbers, to = raw(into)] {
    BelowAutograd below;
    const_cast<at::Tensor&>(to).copy_(numbers);
  });
  issue_here(std::move(operation));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  Values arguments(stack->end() - static_cast<long>(schema.arguments().size()), stack->end());
  c10::DeviceGuard guard(device_of(arguments));
  if (int filled = draws(op) ? drawn_into(schema, arguments) : -1; filled >= 0) {
    draw_now(op, arguments, static_cast<size_t>(filled));
    torch::jit::drop(*stack, schema.arguments().size());
    stack->push_back(arguments[static_cast<size_t>(filled)]);
    return;
  }
  auto shapes_known = draws(op) ? std::nullopt : shapes_of(op, arguments);
  if (shapes_known) resize_outputs(schema, arguments, shapes_known->arguments);
  Values kernel = all_changed(arguments, kernel_argument, at::kCPU);
  Values results(schema.returns().size());
  std::vector<size_t> fresh;
  for (size_t i = 0; i < results.size(); ++i) {
    int argument = argument_of(schema, i);
    if (argument < 0) fresh.push_back(i);
    else results[i] = arguments[static_cast<size_t>(argument)];
  }
  bool captured = Machine::get().captures(current_device(), current_stream(current_device()));
  if (shapes_known || (captured && !sizes_depend_on_values(op))) {
    auto shapes = shapes_known ? shapes_known->results : results_for_zeros(op, arguments);
    Pairs pairs;
    for (size_t i : fresh) results[i] = allocated(shapes[i], pairs);
    std::vector<at::Tensor> into;
    for (auto& pair : pairs) into.push_back(pair.first);
    issue_here(later(toString(op.operator_name()), [op, kernel, fresh, into] { compute(op, kernel, fresh, into); }));
  } else {
    forced(op, kernel, fresh, results);
  }
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) stack->push_back(result);
}

// -- operators that a device has to implement itself -------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &CachingAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &CachingAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, std::move(offset));
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Operation copying(const at::Tensor& from, const at::Tensor& to, bool by_engine) {
  auto operation = later("copy", [from, to] {
    BelowAutograd below;
    const_cast<at::Tensor&>(to).copy_(from);
  });
  operation.copies = by_engine;
  return operation;
}

bool locked(const at::Tensor& tensor) { return Locked::get().has(tensor.const_data_ptr()); }

// A copy between two devices occupies both: copy_requires_temporaries and copy_kernel_cuda of aten/src/ATen/native/cuda/Copy.cu.
void copy_across(const at::Tensor& from, const at::Tensor& to) {
  auto& machine = Machine::get();
  int source = from.device().index(), target = to.device().index();
  machine.block(source, current_stream(source), machine.mark(target, current_stream(target), "copy from another device"));
  machine.issue(source, current_stream(source), copying(raw(from), raw(to), true));
  machine.block(target, current_stream(target), machine.mark(source, current_stream(source), "copy to another device"));
}

// A copy to or from pageable memory has ended when the call returns; one from locked memory only if it is not non-blocking (CUDA
// Runtime API, API synchronization behavior).
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  c10::DeviceGuard guard(ours(from) ? from.device() : to.device());
  int device = current_device(), stream = current_stream(device);
  if (ours(from) && ours(to)) {
    if (from.device() == to.device()) issue_here(copying(raw(from), raw(to), false));
    else copy_across(from, to);
  } else if (ours(to)) {
    issue_here(copying(non_blocking && locked(from) ? from.detach() : from.clone(), raw(to), true));
    if (!non_blocking && locked(from)) Machine::get().wait_stream(device, stream);
  } else if (non_blocking && locked(to)) {
    issue_here(copying(raw(from), to.detach(), true));
  } else {
    Machine::get().wait_stream(device, stream);
    const_cast<at::Tensor&>(to).copy_(raw(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  Machine::get().wait_stream(current_device(), current_stream(current_device()));
  return raw(tensor).item();
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& other) { return at::native::set_tensor_(tensor, other); }

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) { return at::native::set_(tensor, std::move(storage)); }

at::Tensor& set_part(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, std::move(storage), offset, size, stride);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { CachingAllocator::get().recordStream(tensor.storage().data_ptr(), stream); }

// torch would choose a fused kernel on devices (is_fused_kernel_acceptable of Dropout.cpp), which rounds differently from a CPU's.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  if (p == 0 || !train || !input.numel()) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// A parameter may become one of another device in place, as between a CPU and CUDA (TensorImpl::has_compatible_shallow_copy_type lists
// only those devices).
bool may_become(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", dropout);
  m.impl("_has_compatible_shallow_copy_type", may_become);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("record_stream", record_stream);
  // CPUs and CUDA have their own kernel; elsewhere it is composed of others, which round differently.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace late
