// A launch: results are allocated at once, the kernel runs on the CPU when its stream is drained.
#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>

namespace sim {

at::Tensor over_memory(const at::Tensor& tensor, void* data) {
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                              c10::DataPtr(data, c10::Device(c10::kCPU)), nullptr, /*resizable=*/false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

at::Tensor on_cpu(const at::Tensor& tensor) { return over_memory(tensor, host_view(tensor.storage().data())); }

at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

namespace {

bool on_card(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// A value that the host passes with the launch: read now.
at::Tensor passed_by_value(const at::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

struct Call {
  const Operator& op;
  Arguments arguments;
  int device = -1;
  bool host_indices = false, bool_indices = false;
  double bytes = 0, first_bytes = 0, most_bytes = 0;
  at::Tensor first;

  Call(const Operator& of, Arguments* stack)
      : op(of), arguments(std::make_move_iterator(stack->end() - static_cast<std::ptrdiff_t>(of.arguments)), std::make_move_iterator(stack->end())) {
    stack->resize(stack->size() - op.arguments);
    for (size_t i = 0; i < op.arguments; i++) look_at(arguments[i], op.rewrites[i] ? 2 : 1);
    if (device < 0) device = current_device();
    TORCH_CHECK(!host_indices || op.host_index, "Expected all tensors to be on the same device, but found at least two devices, sim:",
                device, " and cpu! (when calling ", op.name, ")");
  }

  void look_at(const c10::IValue& value, double times) {
    bool index_list = value.isOptionalTensorList();
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (index_list && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) bool_indices = true;
      if (!on_card(tensor)) {
        if (tensor.dim() > 0) host_indices = true;
        return;
      }
      int index = tensor.device().index();
      TORCH_CHECK(device < 0 || device == index, "Expected all tensors to be on the same device, but found at least two devices, sim:",
                  device, " and sim:", index, "! (when calling ", op.name, ")");
      device = index;
      add_bytes(tensor, times);
    });
    if (device < 0 && value.isDevice() && value.toDevice().has_index()) device = value.toDevice().index();
  }

  void add_bytes(const at::Tensor& tensor, double times) {
    // An operator in place often comes as one with `out=`: the same table again, of which it writes some rows.
    if (op.moves_rows && tensor.is_same(first)) return;
    if (!first.defined()) first = tensor;
    double size = times * static_cast<double>(tensor.unsafeGetTensorImpl()->numel()) * static_cast<double>(tensor.element_size());
    if (first_bytes == 0 && bytes == 0) first_bytes = size;
    else most_bytes = std::max(most_bytes, size);
    bytes += size;
  }

  // Bytes that the kernel moves; of a table, only the rows it reads or writes.
  double moved(double results) const {
    if (!op.moves_rows) return bytes + results;
    return bytes + results - first_bytes + std::min(first_bytes, std::max(most_bytes, results));
  }

  // The arguments for the CPU's kernel, over device memory.
  Arguments for_cpu() const {
    Arguments result(arguments);
    for (auto& value : result) {
      replace_tensors(value, [](const at::Tensor& tensor) { return on_card(tensor) ? on_cpu(tensor) : passed_by_value(tensor); });
      if (value.isDevice()) value = c10::Device(c10::kCPU);
    }
    return result;
  }
};

void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
}

// Draws as many numbers as the kernel will, so that the next launch goes on behind them.
void advance(const Operator& op, const Arguments& arguments, at::Generator generator) {
  Arguments stack(arguments);
  for (auto& value : stack)
    replace_tensors(value, [](const at::Tensor& tensor) {
      auto options = tensor.options();
      return at::isFloatingType(tensor.scalar_type()) ? at::full(tensor.sizes(), 0.5, options) : at::zeros(tensor.sizes(), options);
    });
  stack[static_cast<size_t>(op.generator)] = generator;
  run_now([&] { op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); });
}

struct Kernel final : Work {
  Kernel(const Call& call) : op(call.op), device(call.device), arguments(call.for_cpu()) { name = op.name; }
  const c10::OperatorHandle& handle() const { return op.handle; }

  const Operator& op;
  int device;
  Arguments arguments;
  at::Generator source;             // of a random operator: where it draws from
  std::vector<at::Tensor> results;  // over device memory; undefined for returns that are arguments

  void run() override {
    Arguments stack(arguments);
    handle().redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < op.returns; i++)
      if (op.alias_of[i] < 0) flatten(stack[i], values);
    for (size_t i = 0; i < results.size(); i++) {
      if (!results[i].defined() || !values[i].defined()) continue;
      TORCH_CHECK(results[i].sizes() == values[i].sizes(), "its Meta kernel gave the shape ", results[i].sizes(), ", not ", values[i].sizes());
      results[i].copy_(values[i]);
    }
  }

  void draw() {
    if (!source.defined()) return;
    arguments[static_cast<size_t>(op.generator)] =
        draw_generator(source, device, [&](at::Generator generator) { advance(op, arguments, generator); });
  }

  std::shared_ptr<Work> drawn() override {
    if (!source.defined()) return nullptr;
    auto copy = std::make_shared<Kernel>(*this);
    copy->draw();
    return copy;
  }
};

at::Generator generator_of(const Call& call) {
  if (call.op.generator < 0) return {};
  const auto& value = call.arguments[static_cast<size_t>(call.op.generator)];
  return value.isGenerator() ? value.toGenerator() : default_generator(call.device);
}

void fit(const at::Tensor& tensor, const Shape& shape) {
  if (tensor.sizes() == c10::IntArrayRef(shape.sizes)) return;
  tensor.resize_(shape.sizes);
}

at::Tensor create(int device, const Shape& shape) {
  return shape.defined ? empty_on(device, shape.sizes, shape.strides, shape.dtype) : at::Tensor();
}

// Allocates the results: those that are arguments, and those that are new.
Arguments make_results(const Call& call, const Outcome* outcome) {
  Arguments results;
  size_t next = 0;
  if (outcome)
    for (const auto& [index, shape] : outcome->resized) fit(call.arguments[static_cast<size_t>(index)].toTensor(), shape);
  for (int alias : call.op.alias_of) {
    if (alias >= 0) {
      results.push_back(call.arguments[static_cast<size_t>(alias)]);
      continue;
    }
    const auto& made = outcome->created[next++];
    if (!made.list) {
      results.emplace_back(create(call.device, made.shapes[0]));
      continue;
    }
    std::vector<at::Tensor> tensors;
    for (const auto& shape : made.shapes) tensors.push_back(create(call.device, shape));
    results.emplace_back(std::move(tensors));
  }
  return results;
}

double result_bytes(const Call& call, const Arguments& results) {
  double bytes = 0;
  for (size_t i = 0; i < results.size(); i++) {
    if (call.op.alias_of[i] >= 0) continue;
    each_tensor(results[i], [&](const at::Tensor& tensor) { bytes += static_cast<double>(tensor.nbytes()); });
  }
  return bytes;
}

void queue(const Call& call, Stream& stream, const Arguments& results) {
  auto kernel = std::make_shared<Kernel>(call);
  kernel->source = generator_of(call);
  for (size_t i = 0; i < results.size(); i++)
    if (call.op.alias_of[i] < 0) flatten(results[i], kernel->results);
  for (auto& tensor : kernel->results)
    if (tensor.defined()) tensor = on_cpu(tensor);
  if (auto capture = capture_of(stream)) return record(*capture, stream, kernel, 0, 0);
  kernel->draw();
  card().devices[static_cast<size_t>(call.device)].counters.launches++;
  submit(stream, kernel);
}

at::Tensor to_card(int device, const at::Tensor& cpu) {
  if (!cpu.defined()) return cpu;
  auto result = empty_on(device, cpu.sizes(), cpu.strides(), cpu.scalar_type());
  if (timed()) mark_written(result.storage().data());
  run_now([&] { on_cpu(result).copy_(cpu); });
  return result;
}

// The host waits for the data, runs the operator, and gives back what shape came out.
void run_at_once(const Call& call, Stream& stream, Arguments* stack, const std::string& kind) {
  if (timed()) occupy(stream, {.flops = 0, .bytes = call.bytes});
  else card().devices[static_cast<size_t>(call.device)].counters.launches++;
  host_sync(stream, kind + call.op.name);
  Kernel kernel(call);
  kernel.source = generator_of(call);
  kernel.draw();
  Arguments arguments(kernel.arguments);
  std::vector<at::Tensor> outs(call.op.arguments);
  for (size_t i = 0; i < call.op.arguments; i++)
    if (call.op.is_out[i] && arguments[i].isTensor()) arguments[i] = outs[i] = at::empty({0}, arguments[i].toTensor().options());
  run_now([&] { kernel.handle().redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments); });
  for (size_t i = 0; i < call.op.arguments; i++) {
    if (!outs[i].defined()) continue;
    const at::Tensor& target = call.arguments[i].toTensor();
    if (target.sizes() != outs[i].sizes()) target.resize_(outs[i].sizes());
    run_now([&] { on_cpu(target).copy_(outs[i]); });
  }
  for (size_t i = 0; i < call.op.returns; i++) {
    int alias = call.op.alias_of[i];
    auto& value = alias >= 0 ? stack->emplace_back(call.arguments[static_cast<size_t>(alias)]) : stack->emplace_back(arguments[i]);
    if (alias < 0) replace_tensors(value, [&](const at::Tensor& cpu) { return to_card(call.device, cpu); });
  }
}

}  // namespace

void launch(const c10::OperatorHandle& handle, Arguments* stack) {
  check_usable();
  Call call(operator_of(handle), stack);
  OnDevice on(call.device);
  Stream& stream = current_stream(call.device);
  check_capture(stream);
  if (call.host_indices) host_sync(stream, "indices from the host");
  // Where a mask is the index and the result is there already, its size was asked before.
  bool sized = call.bool_indices && call.op.resizes;
  if (call.op.reads_data || (call.bool_indices && !sized)) return run_at_once(call, stream, stack, "shape of ");
  bool asks = (call.op.creates || call.op.resizes) && !sized;
  const Outcome* outcome = asks ? &outcome_of(call.op, call.arguments) : nullptr;
  if (outcome && !outcome->known) return run_at_once(call, stream, stack, "no Meta kernel: ");
  auto results = make_results(call, outcome);
  if (timed()) {
    double bytes = call.moved(result_bytes(call, results));
    occupy(stream, {.flops = outcome ? outcome->flops : 0, .bytes = bytes, .dtype = outcome ? outcome->dtype : at::kFloat});
  } else {
    queue(call, stream, results);
  }
  for (auto& value : results) stack->push_back(std::move(value));
}

}  // namespace sim
