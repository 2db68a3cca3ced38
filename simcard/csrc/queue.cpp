// Streams are queues. Work runs when somebody waits for it, in the thread that waits.
#include "card.h"

#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

namespace sim {

Card& card() {
  static Card* card = new Card;  // never destroyed: tensors may outlive static objects
  return *card;
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

c10::impl::LocalDispatchKeySet plain_keys() {
  c10::impl::LocalDispatchKeySet keys(c10::impl::PODLocalDispatchKeySet{});
  keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return keys;
}

bool Position::reached() const { return !stream || stream->done.load() >= seq; }

namespace {

// Kernels run with a clean dispatch state, whatever the thread that waits is in the middle of.
struct PlainDispatch {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Silent silent;  // a kernel on a card cannot warn
  c10::WarningUtils::WarningHandlerGuard no_warnings{&silent};
  c10::impl::ForceDispatchKeyGuard guard{plain_keys()};
  c10::AutoGradMode no_grad{false};
};

void run(Work& work) {
  try {
    PlainDispatch plain;
    work.run();
  } catch (const std::exception& error) {
    std::string what = error.what();
    TORCH_CHECK(false, "sim: a kernel that was launched earlier failed: ", work.name, ": ",
                what.substr(0, what.find("\nException raised from")));
  }
}

// The first entry of a stream, left in place until it has run.
Entry front(Stream& stream) {
  std::lock_guard<std::mutex> lock(card().mutex);
  return stream.queue.front();
}

void pop(Stream& stream) {
  std::lock_guard<std::mutex> lock(card().mutex);
  stream.queue.pop_front();
}

void push(Stream& stream, Entry entry) {
  stream.queue.push_back(std::move(entry));
  stream.queued++;
}

}  // namespace

void run_now(const std::function<void()>& kernel) {
  WithoutGil released;
  std::lock_guard<std::recursive_mutex> executing(card().executor);
  PlainDispatch plain;
  kernel();
}

void drain(Position target) {
  if (target.reached()) return;
  WithoutGil released;
  std::lock_guard<std::recursive_mutex> executing(card().executor);
  std::vector<Position> targets{target};
  while (!targets.empty()) {
    auto [stream, seq] = targets.back();
    if (stream->done.load() >= seq) {
      targets.pop_back();
      continue;
    }
    Entry entry = front(*stream);
    if (!entry.wait.reached()) {
      targets.push_back(entry.wait);
      continue;
    }
    pop(*stream);  // before it runs, so that work that fails is not met again
    auto finish = c10::make_scope_exit([stream = stream] { stream->done++; });
    if (entry.work) run(*entry.work);
  }
}

void drain_all(int device) {
  for (auto& stream : card().devices[device].streams) drain({&stream, stream.queued.load()});
}

void submit(Stream& stream, std::shared_ptr<Work> work) {
  bool full;
  {
    std::lock_guard<std::mutex> lock(card().mutex);
    push(stream, {std::move(work), {}});
    full = stream.queue.size() > kQueueCap;
  }
  if (full) drain({&stream, stream.queued.load()});
}

void wait_for(Stream& stream, Position position) {
  std::lock_guard<std::mutex> lock(card().mutex);
  if (timed()) {
    stream.ready = std::max(stream.ready, position.stream->ready);
  } else if (position.stream != &stream && !position.reached()) {
    push(stream, {nullptr, position});
  }
}

namespace {

// The innermost line of Python that is neither torch's nor the card's.
std::string python_line() {
  std::string line = "no Python frame";
  if (!Py_IsInitialized()) return line;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    std::string name = file ? file : "?";
    bool ours = name.find("-packages/torch/") == std::string::npos && name.find("/simcard/") == std::string::npos;
    bool tests = name.find("/tests/") != std::string::npos;
    if (ours || tests) line = name + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    if (ours || tests) break;
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyErr_Clear();
  PyGILState_Release(gil);
  return line;
}

}  // namespace

void count_sync(int device, const std::string& kind) {
  auto& counters = card().devices[device].counters;
  {
    std::lock_guard<std::mutex> lock(counters.mutex);
    counters.syncs[kind]++;
  }
  if (!card().sync_lines.load()) return;
  auto line = python_line();
  std::lock_guard<std::mutex> lock(card().mutex);
  card().lines.emplace_back(kind, line);
}

void host_sync(Stream& stream, const std::string& kind) {
  check_usable();
  forbid_in_capture(stream.device, &stream, kind);
  count_sync(stream.device, kind);
  if (timed()) sleep_until(stream.ready);
  else drain({&stream, stream.queued.load()});
}

void device_sync(int device, const std::string& kind) {
  check_usable();
  forbid_in_capture(device, nullptr, kind);
  count_sync(device, kind);
  if (!timed()) return drain_all(device);
  double end = 0;
  {
    std::lock_guard<std::mutex> lock(card().mutex);
    for (auto& stream : card().devices[device].streams) end = std::max(end, stream.ready);
  }
  sleep_until(end);
}

namespace {

struct NoteTime final : Work {
  std::shared_ptr<double> time;
  void run() override { *time = now(); }
};

}  // namespace

void record_event(EventState& event, Stream& stream) {
  event.capture = capture_of(stream);
  if (event.capture) {
    check_capture(stream);
    event.position = {&stream, 0};
    return;
  }
  event.time = std::make_shared<double>(0);
  if (timed()) {
    std::lock_guard<std::mutex> lock(card().mutex);
    *event.time = std::max(now(), stream.ready);
    event.position = {&stream, 0};
    return;
  }
  if (event.timing) {
    auto note = std::make_shared<NoteTime>();
    note->time = event.time;
    submit(stream, note);
  }
  event.position = {&stream, stream.queued.load()};
}

void block_on_event(EventState& event, Stream& stream) {
  auto own = capture_of(stream);
  if (event.capture) return fork_capture(event.capture, *event.position.stream, stream);
  if (own) {
    TORCH_CHECK(!event.position.stream,
                "sim: a captured stream cannot wait for an event that was recorded outside the capture");
    return;
  }
  if (!event.position.stream) return;
  if (timed()) {
    std::lock_guard<std::mutex> lock(card().mutex);
    stream.ready = std::max(stream.ready, *event.time);
    return;
  }
  wait_for(stream, event.position);
}

bool query_event(EventState& event) {
  TORCH_CHECK(!event.capture, "sim: an event that was recorded during a capture cannot be queried");
  if (!event.position.stream) return true;
  if (timed()) return now() >= *event.time;
  if (event.position.reached()) return true;
  drain(event.position);  // the card goes on while the host asks, or a loop that asks would never end
  return false;
}

void sync_event(EventState& event) {
  TORCH_CHECK(!event.capture, "sim: an event that was recorded during a capture cannot be waited for");
  check_usable();
  if (!event.position.stream) return;
  forbid_in_capture(event.position.stream->device, event.position.stream, "event synchronize");
  count_sync(event.position.stream->device, "event synchronize");
  if (timed()) sleep_until(*event.time);
  else drain(event.position);
}

bool query_stream(Stream& stream) {
  forbid_in_capture(stream.device, &stream, "stream query");
  if (timed()) return now() >= stream.ready;
  Position position{&stream, stream.queued.load()};
  if (position.reached()) return true;
  drain(position);
  return false;
}

}  // namespace sim
