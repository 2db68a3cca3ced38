// What torch asks of a device: the current device and stream of each thread, events, generators, pinned memory.
#include "card.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

namespace sim {
namespace {

thread_local int this_device = 0;
thread_local std::array<int, kMaxDevices> this_stream{};  // ids; 0 is the default stream

c10::Device device_at(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }

void check_device(int index) {
  TORCH_CHECK(index >= 0 && index < card().device_count.load(), "sim: there is no device ", index, "; there are ",
              card().device_count.load());
}

}  // namespace

int current_device() { return this_device; }
void set_current_device(int index) { this_device = index; }

Stream& current_stream(int index) {
  return card().devices[static_cast<size_t>(index)].streams[static_cast<size_t>(this_stream[static_cast<size_t>(index)])];
}

Stream& stream_of(const c10::Stream& stream) {
  return card().devices[static_cast<size_t>(stream.device_index())].streams[static_cast<size_t>(stream.id())];
}

void check_usable() {
  TORCH_CHECK(!card().forked.load(),
              "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the "
              "'spawn' start method");
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device_at(this_device); }
  void setDevice(c10::Device to) const override {
    if (!to.has_index()) return;
    check_device(to.index());
    this_device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) this_device = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(card().device_count.load());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device on) const override { return current_stream(index(on)).unwrap(); }
  c10::Stream getDefaultStream(c10::Device on) const override { return at(on, 0).unwrap(); }
  c10::Stream getNewStream(c10::Device on, int priority) const override {
    check_usable();
    auto& device = card().devices[static_cast<size_t>(index(on))];
    if (priority < 0) return at(on, kFirstUrgent + device.next_urgent++ % (kStreamsPerDevice - kFirstUrgent)).unwrap();
    return at(on, 1 + device.next_stream++ % (kFirstUrgent - 1)).unwrap();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool is_urgent) const override {
    return getNewStream(on, is_urgent ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    this_stream[static_cast<size_t>(to.device_index())] = static_cast<int>(to.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_sync(stream_of(stream), "stream synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex on) const override { device_sync(on, "device synchronize"); }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return capture_of(stream_of(stream)) != nullptr;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex on, const c10::EventFlag flag) const override {
    TORCH_CHECK(on == -1 || on == stream.device_index(), "sim: an event of device ", static_cast<int>(on),
                " cannot be recorded in a stream of device ", static_cast<int>(stream.device_index()));
    if (!*event) *event = new EventState;
    auto& state = *static_cast<EventState*>(*event);
    state.timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    record_event(state, stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) block_on_event(*static_cast<EventState*>(event), stream_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || query_event(*static_cast<EventState*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) sync_event(*static_cast<EventState*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "sim: both events must be recorded before the time between them is asked");
    auto &a = *static_cast<EventState*>(first), &b = *static_cast<EventState*>(second);
    TORCH_CHECK(a.timing && b.timing, "sim: both events need enable_timing=True");
    TORCH_CHECK(query_event(a) && query_event(b), "sim: both events must be finished (synchronize them first)");
    return 1e3 * (*b.time - *a.time);
  }

 private:
  static int index(c10::Device on) { return on.has_index() ? on.index() : this_device; }
  static Stream& at(c10::Device on, int id) {
    return card().devices[static_cast<size_t>(index(on))].streams[static_cast<size_t>(id)];
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Draws the CPU's numbers: a seed gives on the card what it gives on the CPU.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int index)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}
  at::Generator cpu;
  std::mutex drawing;

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim: generators have no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override {
    auto impl = cpu.unsafeGetGeneratorImpl();
    return impl->seed();
  }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

at::Generator new_generator(int index) { return at::make_generator<Generator>(index); }

const at::Generator& default_of(int index) {
  static auto* generators = [] {
    auto* all = new std::array<at::Generator, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; i++) (*all)[static_cast<size_t>(i)] = new_generator(i);
    return all;
  }();
  return (*generators)[static_cast<size_t>(index < 0 ? this_device : index)];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return card().device_count.load() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return isAvailable(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(card().device_count.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  void setCurrentDevice(c10::DeviceIndex to) const override {
    check_device(to);
    this_device = to;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(to);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? to : exchangeDevice(to);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kSim); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? this_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(this_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    OnDevice on(storage.device().index());
    auto memory = device_allocator()->allocate(bytes);
    auto copied = std::min(bytes, storage.nbytes());
    if (copied) {
      host_sync(current_stream(storage.device().index()), "storage resize");
      device_allocator()->copy_data(memory.get(), storage.data(), copied);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { card().forked = true; });
  return true;
}();

}  // namespace

at::Generator default_generator(int index) { return default_of(index); }

at::Generator draw_generator(const at::Generator& generator, int index, const std::function<void(at::Generator)>& advance) {
  TORCH_CHECK(generator.device() == device_at(index), "Expected a generator of ", device_at(index), " but found one of ",
              generator.device());
  auto& ours = *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  WithoutGil released;
  std::lock_guard<std::mutex> lock(ours.drawing);
  auto copy = ours.cpu.clone();
  advance(ours.cpu);
  return copy;
}

}  // namespace sim
