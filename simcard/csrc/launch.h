// How operators become launches.
#pragma once
#include "card.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

using Arguments = torch::jit::Stack;

// What is known of an operator from its schema; found once.
struct Operator {
  explicit Operator(const c10::OperatorHandle& handle);
  c10::OperatorHandle handle;
  std::string name;
  size_t arguments, returns;
  std::vector<int> alias_of;   // for each return: the argument that it is, or -1
  std::vector<bool> is_out;    // for each argument: resized by the operator (`out=`)
  std::vector<bool> rewrites;  // for each argument: read and written in place
  bool resizes = false, creates = false;
  int generator = -1;          // the argument, or -1
  bool reads_data = false;     // the shape of the result depends on data: the host must wait
  bool shape_from_scalars = false;
  bool moves_rows = false;     // reads or writes only some rows of its first tensor
  bool host_index = false;     // takes indices in host memory
  enum class Flops { none, mm, addmm, bmm, baddbmm, convolution, convolution_backward } flops = Flops::none;
};
const Operator& operator_of(const c10::OperatorHandle& handle);

// The shape of one result.
struct Shape {
  bool defined = true;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

// What an operator gives for arguments of certain shapes.
struct Outcome {
  std::vector<int64_t> key;
  bool known = true;  // false: torch cannot tell without running it
  struct Return {
    bool list = false;
    std::vector<Shape> shapes;
  };
  std::vector<Return> created;                   // for returns that are no argument
  std::vector<std::pair<int, Shape>> resized;    // for `out=` arguments
  double flops = 0;
  at::ScalarType dtype = at::kFloat;
};
const Outcome& outcome_of(const Operator& op, const Arguments& arguments);

void launch(const c10::OperatorHandle& handle, Arguments* stack);

// Calls `f` for each tensor of an argument and puts what it returns in its place.
template <typename F>
void replace_tensors(c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = f(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor.defined() ? f(tensor) : tensor);
    value = std::move(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      tensors.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(f(*tensor)) : tensor);
    value = std::move(tensors);
  }
}

template <typename F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) f(tensor);
  } else if (value.isTensorList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.toTensor().defined()) f(item.toTensor());
  } else if (value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined()) f(item.toTensor());
  }
}

}  // namespace sim
