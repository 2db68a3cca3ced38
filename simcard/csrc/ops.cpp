// Operators that are no kernels (memory, views, copies, reading a value), and the fall-back for all that are.
#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

constexpr size_t kCopiedInTimedMode = 1 << 20;

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  OnDevice on(device && device->has_index() ? device->index() : current_device());
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_on(device && device->has_index() ? device->index() : current_device(), sizes, strides,
                  c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), static_cast<size_t>(self.storage_offset()));
  auto storage = self.storage();
  if (self.numel() == 0 || storage.nbytes() >= bytes) return self;
  OnDevice on(self.device().index());
  auto memory = device_allocator()->allocate(bytes);
  auto kept = storage.nbytes();
  if (kept) {
    host_sync(current_stream(self.device().index()), "resize");
    device_allocator()->copy_data(memory.get(), storage.data(), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  return self;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor& set_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  else self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_offset(self, std::move(source), 0, {count}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// --- copies

struct Copy final : Work {
  at::Tensor from, to;
  void run() override { to.copy_(from); }
};

bool on_card(const at::Tensor& tensor) { return tensor.device().type() == kSim; }
bool pinned(const at::Tensor& tensor) { return tensor.numel() > 0 && is_pinned(tensor.storage().data()); }

// Whether the copy engine can move the bytes as they are; else the host converts a pageable copy of them.
bool same_layout(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.strides() == to.strides() && from.is_non_overlapping_and_dense();
}

// Host memory by address alone, as a copy engine sees it.
at::Tensor by_address(const at::Tensor& host) { return over_memory(host, const_cast<void*>(host.storage().data())); }

void queue_copy(Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  auto copy = std::make_shared<Copy>();
  copy->from = from;
  copy->to = to;
  copy->name = "copy";
  if (auto capture = capture_of(stream)) return record(*capture, stream, copy, 0, 0);
  submit(stream, copy);
}

// In timed mode large buffers are not touched, except where the host could not have put anything there itself.
void copy_values(const at::Tensor& from, const at::Tensor& to, bool fresh) {
  if (on_card(to)) {
    if (to.nbytes() > kCopiedInTimedMode) return;
    mark_written(to.storage().data());
    run_now([&] { on_cpu(to).copy_(from); });
  } else if (from.nbytes() <= kCopiedInTimedMode || was_written(from.storage().data())) {
    run_now([&] { to.copy_(on_cpu(from)); });
  } else if (fresh) {
    run_now([&] { to.zero_(); });
  }
}

void copy_to_card(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(to.device().index());
  bool late = pinned(from) && same_layout(from, to);
  if (!late || !non_blocking)
    if (capture_of(stream)) forbid_in_capture(stream.device, &stream, "a copy from pageable memory, or one that blocks");
  count_copy(stream, CopyKind::to_device, static_cast<int64_t>(to.nbytes()));
  if (timed()) {
    occupy_copy(stream, CopyKind::to_device, static_cast<double>(to.nbytes()));
    if (!non_blocking) copy_values(from, to, false);
  } else {
    queue_copy(stream, late ? by_address(from) : from.detach().clone(), on_cpu(to));
    if (late) use_pinned(from.storage().data(), stream);
  }
  if (!non_blocking) host_sync(stream, "copy to the device");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(from.device().index());
  bool late = non_blocking && pinned(to) && to.is_non_overlapping_and_dense();
  if (!late && capture_of(stream)) forbid_in_capture(stream.device, &stream, "a copy to the host that blocks");
  count_copy(stream, CopyKind::to_host, static_cast<int64_t>(to.nbytes()));
  if (timed()) {
    occupy_copy(stream, CopyKind::to_host, static_cast<double>(to.nbytes()));
    copy_values(from, to, !late);
  } else {
    queue_copy(stream, on_cpu(from), late ? by_address(to) : to);
    if (late) use_pinned(to.storage().data(), stream);
  }
  if (!late) host_sync(stream, "copy to the host");
}

void copy_on_card(const at::Tensor& from, const at::Tensor& to) {
  Stream& stream = current_stream(from.device().index());
  Stream& other = current_stream(to.device().index());
  count_copy(stream, CopyKind::on_device, static_cast<int64_t>(to.nbytes()));
  bool two = &stream != &other;
  TORCH_CHECK(!two || (!capture_of(stream) && !capture_of(other)), "sim: a copy between devices cannot be captured");
  if (two) wait_for(stream, {&other, other.queued.load()});
  if (!capture_of(stream)) card().devices[static_cast<size_t>(stream.device)].counters.launches++;
  if (timed()) occupy_copy(stream, CopyKind::on_device, static_cast<double>(to.nbytes()));
  else queue_copy(stream, on_cpu(from), on_cpu(to));
  if (two) wait_for(other, {&stream, stream.queued.load()});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_usable();
  if (to.numel() == 0) return to;
  auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  check_capture(current_stream((on_card(from) ? from : to).device().index()));
  if (on_card(from) && on_card(to)) copy_on_card(source, to);
  else if (on_card(to)) copy_to_card(source, to, non_blocking);
  else copy_to_host(source, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  Stream& stream = current_stream(self.device().index());
  check_capture(stream);
  if (timed()) occupy_copy(stream, CopyKind::to_host, static_cast<double>(self.element_size()));
  count_copy(stream, CopyKind::to_host, static_cast<int64_t>(self.element_size()));
  host_sync(stream, "item");
  at::Scalar value;
  run_now([&] { value = on_cpu(self).item(); });
  return value;
}

// --- operators whose CPU kernel has another name

c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, Arguments* stack) { launch(named("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle&, Arguments* stack) {
  auto first = stack->end() - 10;  // grad_output, input, weight, stride, …, transposed (6), …, groups (8), output_mask (9)
  const auto& weight = first[2].toTensor();
  int64_t channels = first[6].toBool() ? weight.size(1) * first[8].toInt() : weight.size(0);
  c10::IValue bias = first[9].toBoolList()[2] ? c10::IValue(std::vector<int64_t>{channels}) : c10::IValue();
  stack->insert(first + 3, bias);
  launch(named("aten::convolution_backward"), stack);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // One launch each, as on a GPU; torch would take them apart.
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "addr.out", "all.dims", "all.dims_out",
                           "any.dims", "any.dims_out", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
    }
}

}  // namespace sim
