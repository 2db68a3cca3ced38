// Pinned host memory: ordinary memory that copies read and write late.
// A block that is freed while a queued copy uses it is kept until the copy is done.
#include "card.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <string.h>

namespace sim {
namespace {

struct Pinned {
  size_t size = 0;
  bool registered = false;  // memory of somebody else
  std::vector<Position> users;
};

struct Host {
  std::mutex mutex;
  std::map<char*, Pinned> blocks;  // in use, or freed and still in a queue
  std::vector<char*> freed;
  std::multimap<size_t, char*> cache;
  at::HostStats stats;
};

Host& host() {
  static auto* host = new Host;
  return *host;
}

size_t rounded(size_t bytes) {
  size_t size = 4096;
  while (size < bytes) size *= 2;
  return size;
}

bool finished(Pinned& block) {
  for (auto& position : block.users)
    if (!position.reached()) return false;
  return true;
}

void reclaim(Host& h) {
  std::erase_if(h.freed, [&](char* address) {
    auto it = h.blocks.find(address);
    if (!finished(it->second)) return false;
    h.cache.emplace(it->second.size, address);
    h.blocks.erase(it);
    return true;
  });
}

void give_back(void* address) {
  if (!address || card().forked.load()) return;
  Host& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  h.freed.push_back(static_cast<char*>(address));
  reclaim(h);
}

char* take(size_t bytes) {
  Host& h = host();
  std::lock_guard<std::mutex> lock(h.mutex);
  reclaim(h);
  size_t size = rounded(bytes);
  auto it = h.cache.find(size);
  char* address;
  if (it != h.cache.end()) {
    address = it->second;
    h.cache.erase(it);
  } else {
    address = static_cast<char*>(c10::alloc_cpu(size));
    memset(address, 0, timed() ? size : 0);
  }
  h.blocks[address] = {size, false, {}};
  return address;
}

std::map<char*, Pinned>::iterator block_at(Host& h, const void* address) {
  auto key = static_cast<char*>(const_cast<void*>(address));
  auto it = h.blocks.upper_bound(key);
  if (it == h.blocks.begin()) return h.blocks.end();
  --it;
  return key < it->first + it->second.size ? it : h.blocks.end();
}

struct Allocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* address = bytes ? take(bytes) : nullptr;
    return {address, address, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void* address, void*, c10::Stream stream) override {
    use_pinned(address, stream_of(stream));
    return true;
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(host().mutex);
    reclaim(host());
    for (auto& [size, address] : host().cache) c10::free_cpu(address);
    host().cache.clear();
  }
  at::HostStats get_stats() override { return host().stats; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

Allocator* allocator() {
  static auto* allocator = new Allocator;
  return allocator;
}
const bool registered = (at::setHostAllocator(kSim, allocator(), 1), true);

}  // namespace

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(host().mutex);
  return block_at(host(), address) != host().blocks.end();
}

void use_pinned(const void* address, Stream& stream) {
  std::lock_guard<std::mutex> lock(host().mutex);
  auto it = block_at(host(), address);
  if (it == host().blocks.end()) return;
  auto& users = it->second.users;
  std::erase_if(users, [&](Position& p) { return p.stream == &stream || p.reached(); });
  users.push_back({&stream, stream.queued.load()});
}

void register_pinned(void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(host().mutex);
  host().blocks[static_cast<char*>(address)] = {bytes, true, {}};
}

void unregister_pinned(void* address) {
  std::lock_guard<std::mutex> lock(host().mutex);
  host().blocks.erase(static_cast<char*>(address));
}

}  // namespace sim
