// Device memory: reserved addresses that the host cannot touch, and a caching allocator ordered by streams.
//
// A device address lies in a range without any permission. The executor sees the same memory at a fixed distance
// from there. Rounding and splitting follow the rules of torch's allocator for CUDA.
#include "card.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kMinBlock = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20;
constexpr size_t kMinLarge = 10 << 20, kLargeSegment = 20 << 20, kRoundLarge = 2 << 20;
constexpr size_t kRegion = size_t{1} << 40;  // addresses of each device; costs nothing until it is used

struct Pool;

struct Block {
  char* address = nullptr;
  size_t size = 0, requested = 0;
  Stream* stream = nullptr;
  Pool* pool = nullptr;
  Block *before = nullptr, *after = nullptr;  // neighbours in the same segment
  bool used = false, small = false, written = false;
  std::set<Stream*> users;           // by record_stream
  std::vector<Position> reusable_at;  // after it was freed
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};

using FreeBlocks = std::set<Block*, BySize>;

struct Pool {
  c10::MempoolId_t id{0, 0};
  int graphs = 0;
  FreeBlocks small, large;
  FreeBlocks& blocks(bool is_small) { return is_small ? small : large; }
};

struct Memory {
  std::mutex mutex;
  char* base = nullptr;       // what tensors hold
  std::ptrdiff_t shadow = 0;  // from there to what the executor uses
  size_t limit = 0, reserved = 0, next = 0;
  std::map<size_t, std::vector<char*>> free_ranges;  // released segments by size
  std::map<char*, Block*> blocks;
  Pool pool;
  std::map<c10::MempoolId_t, Pool> private_pools;
  std::vector<Block*> waiting;  // freed, but another stream still uses them
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t fail_in = 0;
};

Memory& memory(int device) {
  static auto* memories = new std::array<Memory, kMaxDevices>;
  return (*memories)[static_cast<size_t>(device)];
}

void add(StatArray& stat, bool small, size_t amount) {
  stat[0].increase(amount);
  stat[small ? 1 : 2].increase(amount);
}
void sub(StatArray& stat, bool small, size_t amount) {
  stat[0].decrease(amount);
  stat[small ? 1 : 2].decrease(amount);
}

size_t rounded(size_t bytes) { return std::max(kMinBlock, (bytes + kMinBlock - 1) / kMinBlock * kMinBlock); }

size_t segment_size(size_t bytes) {
  if (bytes <= kSmall) return kSmallSegment;
  if (bytes < kMinLarge) return kLargeSegment;
  return (bytes + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

// One line before the crash that would follow anyway.
struct sigaction before_us;
void on_fault(int signal, siginfo_t* info, void* context) {
  char* address = static_cast<char*>(info->si_addr);
  for (int i = 0; i < card().device_count.load(); i++) {
    char* base = memory(i).base;
    if (!base || address < base || address >= base + kRegion) continue;
    const char text[] = "simcard: the host touched device memory (a pointer of a tensor on the card was used on the CPU)\n";
    (void)!write(2, text, sizeof(text) - 1);
  }
  if (before_us.sa_flags & SA_SIGINFO) {
    if (before_us.sa_sigaction) return before_us.sa_sigaction(signal, info, context);
  } else if (before_us.sa_handler != SIG_DFL && before_us.sa_handler != SIG_IGN) {
    return before_us.sa_handler(signal);
  }
  ::signal(signal, SIG_DFL);
}

void watch_faults() {
  static bool once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &before_us) == 0;
  }();
  (void)once;
}

char* reserve(int permissions) {
  void* address = mmap(nullptr, kRegion, permissions, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "sim: no address space for the memory of the card");
  madvise(address, kRegion, MADV_DONTDUMP);
  return static_cast<char*>(address);
}

Block* new_segment(Memory& m, size_t bytes, Stream* stream, Pool* pool) {
  size_t size = segment_size(bytes);
  if (m.reserved + size > m.limit) return nullptr;
  char* address;
  auto& ranges = m.free_ranges[size];
  if (!ranges.empty()) {
    address = ranges.back();
    ranges.pop_back();
  } else {
    TORCH_CHECK(m.next + size <= kRegion, "sim: the address space of the card is used up");
    address = m.base + m.next;
    m.next += size;
  }
  auto* block = new Block{.address = address, .size = size, .stream = stream, .pool = pool};
  block->small = bytes <= kSmall;
  m.blocks[address] = block;
  m.reserved += size;
  m.stats.num_device_alloc++;
  add(m.stats.segment, block->small, 1);
  add(m.stats.reserved_bytes, block->small, size);
  return block;
}

void release_segment(Memory& m, Block* block) {
  madvise(block->address + m.shadow, block->size, MADV_DONTNEED);
  m.reserved -= block->size;
  m.stats.num_device_free++;
  sub(m.stats.segment, block->small, 1);
  sub(m.stats.reserved_bytes, block->small, block->size);
  m.free_ranges[block->size].push_back(block->address);
  m.blocks.erase(block->address);
  delete block;
}

void release_unused(Memory& m, FreeBlocks& blocks) {
  for (auto it = blocks.begin(); it != blocks.end();) {
    Block* block = *it;
    if (block->before || block->after) {
      ++it;
    } else {
      it = blocks.erase(it);
      release_segment(m, block);
    }
  }
}

void join(Memory& m, Block* block, Block* neighbour) {
  if (!neighbour || neighbour->used || !neighbour->reusable_at.empty()) return;
  neighbour->pool->blocks(neighbour->small).erase(neighbour);
  m.blocks.erase(neighbour->address);
  if (neighbour == block->before) {
    block->address = neighbour->address;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  block->size += neighbour->size;
  block->written |= neighbour->written;
  delete neighbour;
}

void put_back(Memory& m, Block* block) {
  block->reusable_at.clear();
  sub(m.stats.active, block->small, 1);
  m.blocks.erase(block->address);
  join(m, block, block->before);
  join(m, block, block->after);
  m.blocks[block->address] = block;
  block->pool->blocks(block->small).insert(block);
}

void put_back_finished(Memory& m) {
  for (size_t i = 0; i < m.waiting.size();) {
    Block* block = m.waiting[i];
    bool finished = true;
    for (auto& position : block->reusable_at) finished &= position.reached();
    if (!finished) {
      i++;
      continue;
    }
    m.waiting.erase(m.waiting.begin() + static_cast<std::ptrdiff_t>(i));
    put_back(m, block);
  }
}

Block* cached(size_t size, Stream* stream, Pool* pool) {
  auto& blocks = pool->blocks(size <= kSmall);
  Block key{.size = size, .stream = stream};
  auto it = blocks.lower_bound(&key);
  if (it == blocks.end() || (*it)->stream != stream) return nullptr;
  Block* block = *it;
  blocks.erase(it);
  return block;
}

void split(Memory& m, Block* block, size_t size) {
  size_t rest = block->size - size;
  if (block->small ? rest < kMinBlock : rest <= kSmall) return;
  auto* tail = new Block{.address = block->address + size, .size = rest, .stream = block->stream, .pool = block->pool};
  tail->small = block->small;
  tail->written = block->written;
  tail->before = block;
  tail->after = block->after;
  if (tail->after) tail->after->before = tail;
  block->after = tail;
  block->size = size;
  m.blocks[tail->address] = tail;
  block->pool->blocks(block->small).insert(tail);
}

Pool* pool_for(Memory& m, Stream& stream) {
  auto capture = capture_of(stream);
  return capture ? &m.private_pools.at(capture_pool(*capture)) : &m.pool;
}

Block* find(Memory& m, size_t size, Stream& stream) {
  put_back_finished(m);
  Pool* pool = pool_for(m, stream);
  if (Block* block = cached(size, &stream, pool)) return block;
  if (pool == &m.pool) forbid_beside_capture("an allocation of device memory");
  return new_segment(m, size, &stream, pool);
}

void release_cached(Memory& m) {
  put_back_finished(m);
  release_unused(m, m.pool.small);
  release_unused(m, m.pool.large);
  for (auto& [id, pool] : m.private_pools) {
    if (pool.graphs > 0) continue;
    release_unused(m, pool.small);
    release_unused(m, pool.large);
  }
}

[[noreturn]] void out_of_memory(Memory& m, int device, size_t bytes) {
  m.stats.num_ooms++;
  auto allocated = static_cast<size_t>(m.stats.allocated_bytes[0].current);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", format_size(bytes), ". Device ",
                   device, " has a total capacity of ", format_size(m.limit), " of which ",
                   format_size(m.limit - std::min(m.limit, m.reserved)), " is free. Of the allocated memory ", format_size(allocated),
                   " is allocated by PyTorch, and ", format_size(m.reserved - allocated),
                   " is reserved by PyTorch but unallocated.");
}

Block* find_or_fail(Memory& m, std::unique_lock<std::mutex>& lock, size_t bytes, int device, Stream& stream) {
  bool fail = m.fail_in > 0 && --m.fail_in == 0;
  if (!fail)
    if (Block* block = find(m, rounded(bytes), stream)) return block;
  m.stats.num_alloc_retries++;
  if (!m.waiting.empty()) {  // as torch does: wait for the streams that use freed blocks
    std::vector<Position> positions;
    for (auto* block : m.waiting)
      positions.insert(positions.end(), block->reusable_at.begin(), block->reusable_at.end());
    lock.unlock();
    for (auto& position : positions) drain(position);
    lock.lock();
    m.stats.num_sync_all_streams++;
  }
  lock.unlock();
  drain_all(device);  // as freeing memory does: what is queued may still use it
  lock.lock();
  release_cached(m);
  if (!fail)
    if (Block* block = find(m, rounded(bytes), stream)) return block;
  out_of_memory(m, device, bytes);
}

void* take(int device, size_t bytes, Stream& stream) {
  check_usable();
  check_capture(stream);
  card().devices[device].counters.allocations++;
  Memory& m = memory(device);
  std::unique_lock<std::mutex> lock(m.mutex);
  Block* block = find_or_fail(m, lock, bytes, device, stream);
  split(m, block, rounded(bytes));
  block->used = true;
  block->requested = bytes;
  add(m.stats.allocation, block->small, 1);
  add(m.stats.active, block->small, 1);
  add(m.stats.allocated_bytes, block->small, block->size);
  add(m.stats.active_bytes, block->small, block->size);
  add(m.stats.requested_bytes, block->small, bytes);
  if (!timed()) {
    block->written = true;  // by kernels, which compute in this mode
  } else if (block->written) {
    memset(block->address + m.shadow, 0, block->size);
    block->written = false;
  }
  return block->address;
}

int device_of(const void* address) {
  for (int i = 0; i < card().device_count.load(); i++) {
    char* base = memory(i).base;
    if (base && address >= base && address < base + kRegion) return i;
  }
  return -1;
}

Block* block_at(Memory& m, const void* address) {
  auto it = m.blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  return it == m.blocks.begin() ? nullptr : std::prev(it)->second;
}

void give_back(void* address) {
  if (!address || card().forked.load()) return;
  Memory& m = memory(device_of(address));
  std::lock_guard<std::mutex> lock(m.mutex);
  Block* block = m.blocks.at(static_cast<char*>(address));
  block->used = false;
  sub(m.stats.allocation, block->small, 1);
  sub(m.stats.allocated_bytes, block->small, block->size);
  sub(m.stats.active_bytes, block->small, block->size);
  sub(m.stats.requested_bytes, block->small, block->requested);
  for (Stream* stream : block->users) {
    Position position{stream, stream->queued.load()};
    if (stream != block->stream && !position.reached()) block->reusable_at.push_back(position);
  }
  block->users.clear();
  if (block->reusable_at.empty()) put_back(m, block);
  else m.waiting.push_back(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    void* address = bytes ? take(device, bytes, current_stream(device)) : nullptr;
    return {address, address, &give_back, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    run_now([&] { memcpy(host_view(to), host_view(from), bytes); });
  }
  bool initialized() override { return card().device_count.load() > 0; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < card().device_count.load(); i++) {
      drain_all(i);
      std::lock_guard<std::mutex> lock(memory(i).mutex);
      release_cached(memory(i));
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    int device = device_of(pointer.get());
    if (device < 0) return;
    Memory& m = memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    if (Block* block = block_at(m, pointer.get())) block->users.insert(&stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory(device).mutex);
    return memory(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Memory& m = memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    return {m.limit - std::min(m.limit, m.reserved), m.limit};
  }

 private:
  template <typename F>
  void each(int device, F f) {
    Memory& m = memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    auto& s = m.stats;
    for (auto* array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
                        &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *array) f(stat);
  }
};

Allocator* allocator() {
  static auto* allocator = new Allocator;
  return allocator;
}
const bool registered = (c10::SetAllocator(kSim, allocator(), 1), true);

}  // namespace

c10::DeviceAllocator* device_allocator() { return allocator(); }

void reserve_memory(int device, size_t limit) {
  Memory& m = memory(device);
  if (!m.base) {
    m.base = reserve(PROT_NONE);
    m.shadow = reserve(PROT_READ | PROT_WRITE) - m.base;
    watch_faults();
  }
  m.limit = limit;
}

void set_memory_limit(int device, size_t limit) {
  std::lock_guard<std::mutex> lock(memory(device).mutex);
  memory(device).limit = limit;
}

void fail_allocation(int device, int64_t nth) {
  std::lock_guard<std::mutex> lock(memory(device).mutex);
  memory(device).fail_in = nth;
}

void retain_pool(int device, c10::MempoolId_t id) {
  Memory& m = memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.private_pools[id].id = id;
  m.private_pools[id].graphs++;
}

void release_pool(int device, c10::MempoolId_t id) {
  Memory& m = memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.private_pools.at(id).graphs--;
}

void* host_view(const void* address) {
  if (!address) return nullptr;
  int device = device_of(address);
  TORCH_INTERNAL_ASSERT(device >= 0, "not an address of the card");
  return static_cast<char*>(const_cast<void*>(address)) + memory(device).shadow;
}

void mark_written(const void* address) {
  Memory& m = memory(device_of(address));
  std::lock_guard<std::mutex> lock(m.mutex);
  if (Block* block = block_at(m, address)) block->written = true;
}

bool was_written(const void* address) {
  Memory& m = memory(device_of(address));
  std::lock_guard<std::mutex> lock(m.mutex);
  Block* block = block_at(m, address);
  return block && block->written;
}

}  // namespace sim
