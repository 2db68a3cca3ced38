// Graphs: work is recorded at capture and queued as one launch at replay.
#include "card.h"

#include <ATen/core/GraphImplInterface.h>

#include <fstream>
#include <thread>

namespace sim {

struct Capture {
  int device = 0;
  Stream* origin = nullptr;
  std::thread::id thread;
  at::GraphCaptureMode mode = at::GraphCaptureMode::Default;
  c10::MempoolId_t pool;
  std::vector<std::shared_ptr<Work>> works;
  size_t kernels = 0;
  double compute = 0, copies = 0;    // seconds, in timed mode
  std::array<int64_t, 3> copy_counts{}, copy_bytes{};
  std::map<Stream*, bool> forked;    // side streams, and whether their work was joined
  std::string spoiled;               // why the capture can no longer end well
  bool alive = true;

  bool global() const { return mode == at::GraphCaptureMode::Default || mode == at::GraphCaptureMode::Global; }
  bool has(Stream* stream) const { return stream == origin || forked.count(stream); }
};

std::shared_ptr<Capture> capture_of(Stream& stream) {
  if (!card().captures.load(std::memory_order_relaxed)) return nullptr;
  std::lock_guard<std::mutex> lock(card().mutex);
  return stream.capture;
}

c10::MempoolId_t capture_pool(const Capture& capture) { return capture.pool; }

namespace {

[[noreturn]] void spoil(Capture& capture, const std::string& what) {
  if (capture.spoiled.empty()) capture.spoiled = what;
  TORCH_CHECK(false, "sim: operation not permitted when stream is capturing: ", what);
}

}  // namespace

void check_capture(Stream& stream) {
  auto capture = capture_of(stream);
  if (!capture) return;
  std::lock_guard<std::mutex> lock(card().mutex);
  TORCH_CHECK(capture->spoiled.empty(), "sim: the capture is invalid: ", capture->spoiled);
}

void record(Capture& capture, Stream& stream, std::shared_ptr<Work> work, double compute, double copies) {
  check_capture(stream);
  std::lock_guard<std::mutex> lock(card().mutex);
  if (work) capture.works.push_back(std::move(work));
  capture.kernels++;
  capture.compute += compute;
  capture.copies += copies;
  if (&stream != capture.origin) capture.forked[&stream] = false;
}

void count_copy_in(Capture& capture, CopyKind kind, int64_t bytes) {
  std::lock_guard<std::mutex> lock(card().mutex);
  capture.copy_counts[static_cast<size_t>(kind)]++;
  capture.copy_bytes[static_cast<size_t>(kind)] += bytes;
}

void forbid_in_capture(int device, Stream* stream, const std::string& what) {
  if (!card().captures.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(card().mutex);
  for (auto& capture : card().active) {
    bool own_thread = capture->thread == std::this_thread::get_id();
    bool meant = stream ? capture->has(stream) : capture->device == device;
    if (meant || (own_thread && capture->mode != at::GraphCaptureMode::Relaxed) || (!own_thread && capture->global()))
      spoil(*capture, what);
  }
}

void forbid_beside_capture(const std::string& what) {
  if (!card().captures.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(card().mutex);
  for (auto& capture : card().active)
    if (capture->thread != std::this_thread::get_id() && capture->global()) spoil(*capture, what + " by another thread");
}

void fork_capture(const std::shared_ptr<Capture>& capture, Stream& from, Stream& to) {
  std::lock_guard<std::mutex> lock(card().mutex);
  TORCH_CHECK(capture->alive, "sim: the event was recorded during a capture that is over");
  TORCH_CHECK(!to.capture || to.capture == capture, "sim: the stream belongs to another capture");
  if (&from != capture->origin) capture->forked[&from] = true;
  if (to.capture) return;
  TORCH_CHECK(to.device == capture->device, "sim: a capture cannot reach a stream of another device");
  to.capture = capture;
  capture->forked[&to] = true;
}

namespace {

// The works of one replay, in the order of the capture.
struct Replay final : Work {
  std::vector<std::shared_ptr<Work>> works;
  void run() override {
    for (auto& work : works) {
      name = work->name;
      work->run();
    }
  }
};

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs& args) : keep_(args.keep_graph) {}
  ~Graph() override {
    if (!card().forked.load()) forget();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    check_usable();
    TORCH_CHECK(!capture_, "sim: this graph was captured already; reset() it first");
    Stream& stream = current_stream(current_device());
    TORCH_CHECK(stream.id != 0, "sim: graphs must be captured on a non-default stream");
    TORCH_CHECK(!capture_of(stream), "sim: this stream is capturing already");
    static std::atomic<unsigned long long> ids{1};
    auto capture = std::make_shared<Capture>();
    capture->device = stream.device;
    capture->origin = &stream;
    capture->thread = std::this_thread::get_id();
    capture->mode = mode;
    capture->pool = pool == c10::MempoolId_t{0, 0} ? c10::MempoolId_t{ids++, 0} : pool;
    retain_pool(stream.device, capture->pool);
    capture_ = capture;
    std::lock_guard<std::mutex> lock(card().mutex);
    stream.capture = capture;
    card().active.push_back(capture);
    card().captures++;
  }

  void capture_end() override {
    TORCH_CHECK(capture_ && capture_->alive, "sim: no capture is under way");
    Stream& stream = current_stream(current_device());
    TORCH_CHECK(&stream == capture_->origin, "sim: a capture must end on the stream where it began");
    stop();
    auto why = capture_->spoiled;
    for (auto& [side, joined] : capture_->forked)
      if (!joined && why.empty()) why = "a side stream was not joined: wait in the first stream for an event of it";
    if (why.empty()) {
      if (!keep_) instantiate();
      return;
    }
    forget();
    TORCH_CHECK(false, "sim: the capture is invalid: ", why);
  }

  void instantiate() override {
    TORCH_CHECK(capture_ && !capture_->alive, "sim: a graph is instantiated after its capture");
    ready_ = true;
  }

  void replay() override {
    check_usable();
    if (!ready_) instantiate();
    Stream& stream = current_stream(capture_->device);
    forbid_replay(stream);
    auto& counters = card().devices[static_cast<size_t>(stream.device)].counters;
    counters.launches++;
    counters.replays++;
    for (size_t i = 0; i < 3; i++) {
      counters.copies[i] += capture_->copy_counts[i];
      counters.copied_bytes[i] += capture_->copy_bytes[i];
    }
    if (timed()) return occupy_graph(stream, capture_->compute, capture_->copies);
    auto replay = std::make_shared<Replay>();
    for (auto& work : capture_->works) {
      auto drawn = work->drawn();
      replay->works.push_back(drawn ? drawn : work);
    }
    submit(stream, replay);
  }

  void reset() override { forget(); }
  c10::MempoolId_t pool() const override {
    TORCH_CHECK(capture_, "sim: the graph has no pool before its capture");
    return capture_->pool;
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    std::ofstream out(path);
    if (capture_)
      for (auto& work : capture_->works) out << work->name << "\n";
  }

 private:
  static void forbid_replay(Stream& stream) {
    TORCH_CHECK(!capture_of(stream), "sim: a graph cannot be replayed on a stream that is capturing");
  }
  void stop() {
    std::lock_guard<std::mutex> lock(card().mutex);
    if (!capture_->alive) return;
    capture_->alive = false;
    capture_->origin->capture = nullptr;
    for (auto& [side, joined] : capture_->forked) side->capture = nullptr;
    std::erase(card().active, capture_);
    card().captures--;
  }
  void forget() {
    if (!capture_) return;
    stop();
    release_pool(capture_->device, capture_->pool);
    capture_ = nullptr;
    ready_ = false;
  }

  bool keep_ = false, ready_ = false;
  std::shared_ptr<Capture> capture_;
};

}  // namespace

// After the device has its name, which is the key.
void register_graphs() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kSim, false), [](at::GraphImplArgs args) {
    return std::unique_ptr<at::GraphImplInterface>(new Graph(args));
  });
}

}  // namespace sim
