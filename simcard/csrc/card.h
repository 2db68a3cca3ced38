// The state of the simulated card: devices, streams, queued work, counters.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kStreamsPerDevice = 33;     // the default stream and a pool of 32
constexpr int kFirstUrgent = kStreamsPerDevice * 3 / 4;  // streams from here on have priority
constexpr size_t kQueueCap = 50'000;      // exact mode: a longer queue is drained, which is no sync
constexpr size_t kLaunchesAhead = 1'024;  // timed mode: the host waits when it is further ahead

enum class Mode { exact, timed };

// Figures of a card; simcard/cards.py says where they come from.
struct Spec {
  double fp32_flops = 1e12, tf32_flops = 1e12, half_flops = 1e12;
  double memory_bandwidth = 1e11, link_bandwidth = 1e10, link_latency = 1e-5;
  double kernel_seconds = 2e-6, graph_kernel_seconds = 1e-6;
};

struct Stream;
struct Capture;

// What one kernel does when its turn comes.
struct Work {
  virtual ~Work() = default;
  virtual void run() = 0;
  // Random work draws anew at each replay of a graph: the work for this replay, or null where nothing is drawn.
  virtual std::shared_ptr<Work> drawn() { return nullptr; }
  std::string name;
};

// A point in a stream: everything that was queued up to `seq`.
struct Position {
  Stream* stream = nullptr;
  uint64_t seq = 0;
  bool reached() const;
};

// Either work, or a wait for a point in another stream.
struct Entry {
  std::shared_ptr<Work> work;
  Position wait;
};

struct Stream {
  int device = 0;
  int id = 0;
  std::deque<Entry> queue;
  std::atomic<uint64_t> queued{0}, done{0};
  double ready = 0;         // timed mode: when all work so far is finished
  std::deque<double> ends;  // timed mode: when its last launches finish
  std::shared_ptr<Capture> capture;
  c10::Stream unwrap() const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id);
  }
};

struct EventState {
  Position position;
  std::shared_ptr<double> time;  // when it was (exact mode) or will be (timed mode) reached
  bool timing = false;
  std::shared_ptr<Capture> capture;
};

// What a kernel costs the card.
struct Cost {
  double flops = 0, bytes = 0;
  at::ScalarType dtype = at::kFloat;
};

enum class CopyKind { to_device, to_host, on_device };

struct Counters {
  std::atomic<int64_t> launches{0}, replays{0}, allocations{0};
  std::array<std::atomic<int64_t>, 3> copies{}, copied_bytes{};
  std::atomic<double> busy_seconds{0}, copy_seconds{0};
  std::mutex mutex;
  std::map<std::string, int64_t> syncs;  // by kind
};

struct Device {
  std::array<Stream, kStreamsPerDevice> streams;
  std::atomic<int> next_stream{0};
  std::atomic<int> next_urgent{0};
  Counters counters;
  double engine_free[3] = {0, 0, 0};  // timed mode: compute, copies to the device, copies to the host
  double urgent_free = 0;  // timed mode: when the work of streams with priority is finished
};

struct Card {
  std::mutex mutex;  // guards queues, captures, events and times; never held while Python or a kernel runs
  std::recursive_mutex executor;  // held while kernels run; never waited for with the GIL held
  std::atomic<Mode> mode{Mode::exact};
  std::atomic<int> device_count{0};
  std::atomic<int> captures{0};
  std::atomic<bool> forked{false};
  std::atomic<bool> sync_lines{false};
  std::vector<std::pair<std::string, std::string>> lines;  // kind, file:line of each sync
  Spec spec;
  std::array<Device, kMaxDevices> devices;
  std::vector<std::shared_ptr<Capture>> active;  // captures under way
};
Card& card();
inline bool timed() { return card().mode.load(std::memory_order_relaxed) == Mode::timed; }

// Releases the GIL, if this thread has it, for as long as this lives.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

c10::impl::LocalDispatchKeySet plain_keys();  // a thread's dispatch state in which nothing is special, no autograd

// --- devices and streams (guard.cpp)
int current_device();
void set_current_device(int index);
Stream& current_stream(int device);
Stream& stream_of(const c10::Stream& stream);
void check_usable();
class OnDevice {  // makes a device current in this scope
 public:
  explicit OnDevice(int index) : before_(current_device()) { set_current_device(index); }
  ~OnDevice() { set_current_device(before_); }

 private:
  int before_;
};

// --- queues (queue.cpp)
void submit(Stream& stream, std::shared_ptr<Work> work);
void wait_for(Stream& stream, Position position);
void drain(Position position);             // run queued work up to here; no sync is counted
void drain_all(int device);
void run_now(const std::function<void()>& kernel);
void host_sync(Stream& stream, const std::string& kind);  // counted; raises during capture
void device_sync(int device, const std::string& kind);
void count_sync(int device, const std::string& kind);
void record_event(EventState& event, Stream& stream);
void block_on_event(EventState& event, Stream& stream);
bool query_event(EventState& event);
void sync_event(EventState& event);
bool query_stream(Stream& stream);

// --- time (timing.cpp)
double now();
void sleep_until(double time);
double kernel_seconds(const Cost& cost, bool in_graph);
void occupy(Stream& stream, const Cost& cost);                           // a kernel
void occupy_copy(Stream& stream, CopyKind kind, double bytes);           // a copy
void occupy_graph(Stream& stream, double compute, double copies);        // a replay
void count_copy(Stream& stream, CopyKind kind, int64_t bytes);

// --- memory (memory.cpp)
c10::DeviceAllocator* device_allocator();
void reserve_memory(int device, size_t limit);
void set_memory_limit(int device, size_t limit);
void fail_allocation(int device, int64_t nth);
void retain_pool(int device, c10::MempoolId_t id);
void release_pool(int device, c10::MempoolId_t id);
void* host_view(const void* device_address);  // where the executor sees device memory
void mark_written(const void* device_address);  // timed mode: zero this block when it is handed out again
bool was_written(const void* device_address);
bool is_pinned(const void* address);
void use_pinned(const void* address, Stream& stream);  // keeps the block until the stream got here
void register_pinned(void* address, size_t bytes);
void unregister_pinned(void* address);

// --- graphs (graph.cpp)
std::shared_ptr<Capture> capture_of(Stream& stream);
void check_capture(Stream& stream);  // raises if the capture of this stream was spoiled
void record(Capture& capture, Stream& stream, std::shared_ptr<Work> work, double compute, double copies);
void forbid_in_capture(int device, Stream* stream, const std::string& what);  // null: all streams of the device
void forbid_beside_capture(const std::string& what);  // by another thread than one that captures in global mode
void fork_capture(const std::shared_ptr<Capture>& capture, Stream& from, Stream& to);
c10::MempoolId_t capture_pool(const Capture& capture);
void count_copy_in(Capture& capture, CopyKind kind, int64_t bytes);
void register_graphs();

// --- launches (launch.cpp)
at::Tensor on_cpu(const at::Tensor& tensor);  // a CPU tensor over the same device memory
at::Tensor over_memory(const at::Tensor& tensor, void* storage_data);  // a CPU tensor of the same layout, owning nothing
at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

// --- generators (guard.cpp)
at::Generator draw_generator(const at::Generator& generator, int device, const std::function<void(at::Generator)>& advance);
at::Generator default_generator(int device);

}  // namespace sim
