// What operators give, before they run: shapes by torch's meta kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

namespace late {

using Values = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// Whether it is a late device's.
inline bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// `made`, with torch's mark of a number of Python's where `of` has it.
at::Tensor with_number(at::Tensor made, const at::Tensor& of);
// The value with its tensors changed, and late devices by another.
c10::IValue changed(const c10::IValue& value, const Change& change, c10::Device device);
Values all_changed(const Values& values, const Change& change, c10::Device device);

// Meta tensors. `arguments`: as the operator leaves them, or none where it writes into none.
struct Shapes {
  Values results;
  Values arguments;
};

// Nothing where the operator has no meta kernel, or its result's size depends on values.
std::optional<Shapes> shapes_of(const c10::OperatorHandle& op, const Values& arguments);

}  // namespace late
