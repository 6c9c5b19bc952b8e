// Shapes of operators' results, from torch's meta kernels before the operators run.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

namespace late {

using Values = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// Whether a tensor is on a late device.
inline bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Return `tensor`, marked as one of Python's numbers if `of` is.
at::Tensor with_number(at::Tensor tensor, const at::Tensor& of);
// The value with its tensors changed, and late devices replaced by another device.
c10::IValue changed(const c10::IValue& value, const Change& change, c10::Device device);
Values all_changed(const Values& values, const Change& change, c10::Device device);

// Meta tensors. `arguments`: as the operator leaves them, or empty if it writes into none.
struct Shapes {
  Values results;
  Values arguments;
};

// Returns nothing if the operator has no meta kernel, or its result's size depends on values.
std::optional<Shapes> shapes_of(const c10::OperatorHandle& op, const Values& arguments);

}  // namespace late
