// Timed mode: what a kernel or a copy costs, and a host that waits for it in real time.
#include "card.h"

#include <ATen/Context.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

namespace sim {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void sleep_until(double end) {
  constexpr double kSpin = 50e-6;
  if (now() >= end) return;
  WithoutGil released;
  thread_local bool precise = (prctl(PR_SET_TIMERSLACK, 1000UL), true);
  (void)precise;
  for (double left = end - now(); left > kSpin; left = end - now()) {
    double seconds = left - kSpin;
    timespec time{static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - static_cast<time_t>(seconds)))};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, nullptr);
  }
  while (now() < end) __builtin_ia32_pause();
}

double kernel_seconds(const Cost& cost, bool in_graph) {
  const Spec& spec = card().spec;
  double peak = spec.fp32_flops;
  if (cost.dtype == at::kHalf || cost.dtype == at::kBFloat16) peak = spec.half_flops;
  else if (cost.flops > 0 && at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST)
    peak = spec.tf32_flops;
  double fixed = in_graph ? spec.graph_kernel_seconds : spec.kernel_seconds;
  return fixed + std::max(cost.flops / peak, cost.bytes / spec.memory_bandwidth);
}

namespace {

void add(std::atomic<double>& sum, double value) {
  double before = sum.load();
  while (!sum.compare_exchange_weak(before, before + value)) {
  }
}

double copy_seconds(CopyKind kind, double bytes) {
  const Spec& spec = card().spec;
  if (kind == CopyKind::on_device) return spec.kernel_seconds + 2 * bytes / spec.memory_bandwidth;
  return spec.link_latency + bytes / spec.link_bandwidth;
}

// Processes that use one card, through the file that SIMCARD_SHARED names; its bytes are zero at first.
struct Shared {
  static constexpr int kProcesses = 64;
  std::atomic<int> next;
  std::atomic<double> busy_until[kProcesses][kMaxDevices];
};

struct Sharing {
  Shared* file = nullptr;
  int own = 0;

  Sharing() {
    const char* path = getenv("SIMCARD_SHARED");
    if (!path) return;
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, sizeof(Shared)) == 0, "sim: SIMCARD_SHARED=", path, " cannot be opened");
    void* address = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    TORCH_CHECK(address != MAP_FAILED, "sim: SIMCARD_SHARED=", path, " cannot be mapped");
    file = static_cast<Shared*>(address);
    own = file->next++ % Shared::kProcesses;
  }

  // Processes whose work occupies the device at that time, this one included: each gets a slice of it.
  int users(int device, double time) const {
    int n = 1;
    for (int i = 0; file && i < Shared::kProcesses; i++) n += i != own && file->busy_until[i][device].load() > time;
    return n;
  }

  void publish(int device, double until) const {
    if (file) file->busy_until[own][device].store(until);
  }
};

const Sharing& sharing() {
  static Sharing it;
  return it;
}

// Puts work of some seconds on an engine; returns when the host may go on.
double place(Stream& stream, int engine, double seconds) {
  Device& device = card().devices[stream.device];
  const Sharing& others = sharing();
  std::lock_guard<std::mutex> lock(card().mutex);
  bool goes_first = engine == 0 && stream.id >= kFirstUrgent;
  double start = std::max({now(), stream.ready, goes_first ? device.urgent_free : device.engine_free[engine]});
  if (engine == 0) seconds *= others.users(stream.device, start);
  if (goes_first) {  // other work that was to run at that time runs later
    for (auto& other : device.streams)
      if (other.ready > start && other.id < kFirstUrgent) other.ready += seconds;
    device.urgent_free = start + seconds;
    device.engine_free[engine] = std::max(device.engine_free[engine], start) + seconds;
  }
  else device.engine_free[engine] = start + seconds;
  if (engine == 0) others.publish(stream.device, device.engine_free[0]);
  stream.ready = start + seconds;
  stream.ends.push_back(stream.ready);
  if (stream.ends.size() <= kLaunchesAhead) return 0;
  double oldest = stream.ends.front();
  stream.ends.pop_front();
  return oldest;
}

void put(Stream& stream, int engine, double seconds, std::atomic<double>& sum) {
  double go_on = place(stream, engine, seconds);
  add(sum, seconds);
  if (go_on > 0) sleep_until(go_on);
}

}  // namespace

void occupy(Stream& stream, const Cost& cost) {
  auto& counters = card().devices[stream.device].counters;
  auto capture = capture_of(stream);
  double seconds = kernel_seconds(cost, capture != nullptr);
  if (capture) return record(*capture, stream, nullptr, seconds, 0);
  counters.launches++;
  put(stream, 0, seconds, counters.busy_seconds);
}

void occupy_copy(Stream& stream, CopyKind kind, double bytes) {
  auto& counters = card().devices[stream.device].counters;
  double seconds = copy_seconds(kind, bytes);
  bool on_device = kind == CopyKind::on_device;
  if (auto capture = capture_of(stream))
    return record(*capture, stream, nullptr, on_device ? seconds : 0, on_device ? 0 : seconds);
  int engine = kind == CopyKind::to_device ? 1 : kind == CopyKind::to_host ? 2 : 0;
  put(stream, engine, seconds, on_device ? counters.busy_seconds : counters.copy_seconds);
}

void occupy_graph(Stream& stream, double compute, double copies) {
  auto& counters = card().devices[stream.device].counters;
  put(stream, 0, compute + copies, counters.busy_seconds);
  add(counters.busy_seconds, -copies);
  add(counters.copy_seconds, copies);
}

void count_copy(Stream& stream, CopyKind kind, int64_t bytes) {
  if (auto capture = capture_of(stream)) return count_copy_in(*capture, kind, bytes);
  auto& counters = card().devices[stream.device].counters;
  counters.copies[static_cast<size_t>(kind)]++;
  counters.copied_bytes[static_cast<size_t>(kind)] += bytes;
}

}  // namespace sim
