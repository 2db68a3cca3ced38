// What Python sees of the card.
#include "card.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

namespace py = pybind11;

namespace sim {
namespace {

void install(int devices, size_t memory_bytes) {
  TORCH_CHECK(devices >= 1 && devices <= kMaxDevices, "sim: 1 to ", kMaxDevices, " devices");
  for (int d = 0; d < devices; d++) {
    for (int s = 0; s < kStreamsPerDevice; s++) {
      auto& stream = card().devices[static_cast<size_t>(d)].streams[static_cast<size_t>(s)];
      stream.device = d;
      stream.id = s;
    }
    reserve_memory(d, memory_bytes);
  }
  card().device_count = devices;
  register_graphs();
}

void set_mode(bool is_timed, std::map<std::string, double> spec) {
  for (int d = 0; d < card().device_count.load(); d++) {
    if (timed()) device_sync(d, "change of mode");
    else drain_all(d);
  }
  card().spec = {spec.at("fp32_flops"), spec.at("tf32_flops"), spec.at("half_flops"), spec.at("memory_bandwidth"),
                 spec.at("link_bandwidth"), spec.at("link_latency"), spec.at("kernel_seconds"), spec.at("graph_kernel_seconds")};
  card().mode = is_timed ? Mode::timed : Mode::exact;
}

py::dict counters(int device) {
  auto& c = card().devices.at(static_cast<size_t>(device)).counters;
  std::lock_guard<std::mutex> lock(c.mutex);
  py::dict result;
  result["launches"] = c.launches.load();
  result["replays"] = c.replays.load();
  result["allocations"] = c.allocations.load();
  const char* kinds[] = {"h2d", "d2h", "d2d"};
  for (size_t i = 0; i < 3; i++) {
    result[(std::string(kinds[i]) + "_copies").c_str()] = c.copies[i].load();
    result[(std::string(kinds[i]) + "_bytes").c_str()] = c.copied_bytes[i].load();
  }
  result["busy_seconds"] = c.busy_seconds.load();
  result["copy_seconds"] = c.copy_seconds.load();
  result["sync_kinds"] = c.syncs;
  return result;
}

void reset() {
  for (auto& device : card().devices) {
    auto& c = device.counters;
    std::lock_guard<std::mutex> lock(c.mutex);
    c.launches = c.replays = c.allocations = 0;
    for (size_t i = 0; i < 3; i++) c.copies[i] = c.copied_bytes[i] = 0;
    c.busy_seconds = c.copy_seconds = 0;
    c.syncs.clear();
  }
}

std::vector<std::pair<std::string, std::string>> take_lines() {
  std::lock_guard<std::mutex> lock(card().mutex);
  return std::exchange(card().lines, {});
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &sim::install);
  m.def("register_graphs", &sim::register_graphs);
  m.def("set_mode", &sim::set_mode);
  m.def("counters", &sim::counters);
  m.def("reset", &sim::reset);
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("fail_allocation", &sim::fail_allocation);
  m.def("record_lines", [](bool on) { sim::card().sync_lines = on; });
  m.def("take_lines", &sim::take_lines);
  m.def("device_count", [] { return sim::card().device_count.load(); });
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(device)));
  });
  m.def("forked", [] { return sim::card().forked.load(); });
  m.def("register_pinned", [](uintptr_t address, size_t bytes) { sim::register_pinned(reinterpret_cast<void*>(address), bytes); });
  m.def("unregister_pinned", [](uintptr_t address) { sim::unregister_pinned(reinterpret_cast<void*>(address)); });
  m.def("queued", [](int device) {
    uint64_t count = 0;
    for (auto& stream : sim::card().devices.at(static_cast<size_t>(device)).streams) count += stream.queued - stream.done;
    return count;
  });
}
