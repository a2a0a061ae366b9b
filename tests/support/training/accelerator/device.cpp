// The device: its clock, streams and events, its memory, its generators, and what Python asks of it.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace accelerator {
namespace {

struct Transfer {
  int64_t due;
  at::Tensor from, to;
};

struct Event {
  int64_t due;
};

std::mutex lock;  // of the five below; autograd has a thread for each device
int64_t now = 0;
int64_t latency = 0;
int64_t due_at[DEVICES][STREAMS] = {};  // when all that was launched on a stream is done
std::vector<Transfer> transfers;
int64_t counts[COUNTS] = {};
void (*on_wait)(int) = nullptr;  // told of each wait, by `Count`

thread_local c10::DeviceIndex device_index = 0;
thread_local std::array<c10::StreamId, DEVICES> stream_ids = {};

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : device_index; }

int64_t& due(c10::Stream stream) { return due_at[index_of(stream.device())][stream.id()]; }

void arrive() {
  auto on_the_way = [](const Transfer& each) { return each.due > now; };
  auto arrived = std::stable_partition(transfers.begin(), transfers.end(), on_the_way);
  for (auto each = arrived; each != transfers.end(); ++each)
    std::memcpy(each->to.data_ptr(), each->from.data_ptr(), each->to.nbytes());
  transfers.erase(arrived, transfers.end());
}

void wait_until(int64_t moment, Count why) {
  {
    std::lock_guard<std::mutex> held(lock);
    now = std::max(now, moment);
    counts[why] += 1;
    arrive();
  }
  if (on_wait) on_wait(why);
}

// -- memory ----------------------------------------------------------------------------------------------------------

std::map<const void*, size_t> pinned;
std::atomic<int64_t> allocated{0}, most_allocated{0};

struct Block {
  void* start;
  size_t size;
};

void release(void* given) {
  auto* block = static_cast<Block*>(given);
  allocated -= static_cast<int64_t>(block->size);
  std::free(block->start);
  delete block;
}

void unpin(void* start) {
  std::lock_guard<std::mutex> held(lock);
  pinned.erase(start);
  std::free(start);
}

void* aligned(size_t size) { return std::aligned_alloc(64, (size + 63) / 64 * 64); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{size ? aligned(size) : nullptr, size};
    int64_t taken = allocated += static_cast<int64_t>(size);
    most_allocated = std::max(most_allocated.load(), taken);
    return {block->start, block, &release, current_device()};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} device_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory);

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = aligned(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> held(lock);
    pinned[start] = size;
    return {start, start, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} pinned_memory;

// -- what torch asks of a device -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override { device_index = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_index = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current_device();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> made{0};
    return numbered(device, 1 + made++ % (STREAMS - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device());
    stream_ids[index_of(stream.device())] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock);
    return due(stream) <= now;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait(stream, STREAM_WAITS); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    for (int id = 0; id < STREAMS; ++id) wait(numbered({TYPE, index}, id), STREAM_WAITS);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> held(lock);
    if (!*event) *event = new Event{0};
    static_cast<Event*>(*event)->due = due(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock);
    due(stream) = std::max(due(stream), static_cast<Event*>(event)->due);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::mutex> held(lock);
    arrive();
    return !event || static_cast<Event*>(event)->due <= now;
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) wait_until(static_cast<Event*>(event)->due, EVENTS);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  static c10::Stream numbered(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index_of(device)), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Made by the class of the CPU's, whose kernels draw from them.
std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = {
      at::make_generator<at::CPUGeneratorImpl>(1), at::make_generator<at::CPUGeneratorImpl>(2)};
  return all;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return device_index; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_index = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(device_index, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void*) const override { return current_device(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generator({TYPE, index});
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};

}  // namespace

// -- what kernels ask of the device ----------------------------------------------------------------------------------

c10::Device current_device() { return {TYPE, device_index}; }

c10::Stream current_stream(c10::Device device) { return Guard::numbered(device, stream_ids[index_of(device)]); }

c10::Allocator* memory() { return &device_memory; }

const at::Generator& generator(c10::Device device) { return generators()[index_of(device)]; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return pointer < static_cast<const char*>(start) + size;
}

void launch(c10::Stream stream) {
  std::lock_guard<std::mutex> held(lock);
  counts[LAUNCHES] += 1;
  now += 1;
  due(stream) = std::max(due(stream), now + latency);
  arrive();
}

void order(c10::Stream earlier, c10::Stream later) {
  std::lock_guard<std::mutex> held(lock);
  due(later) = std::max(due(later), due(earlier));
}

void wait(c10::Stream stream, Count why) { wait_until(due(stream), why); }

void deliver(c10::Stream stream, const at::Tensor& from, const at::Tensor& to) {
  launch(stream);
  std::lock_guard<std::mutex> held(lock);
  std::memset(to.data_ptr(), 0xFF, to.nbytes());  // NaN, for who reads it too early
  transfers.push_back({due(stream), from, to});
  arrive();
}

}  // namespace accelerator

// -- what Python asks ------------------------------------------------------------------------------------------------

using namespace accelerator;

extern "C" {
void accelerator_register() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
void accelerator_set_latency(int64_t ticks) {
  std::lock_guard<std::mutex> held(lock);
  latency = ticks;
}
void accelerator_on_wait(void (*told)(int)) { on_wait = told; }
int64_t accelerator_count(int which) {
  std::lock_guard<std::mutex> held(lock);
  return counts[which];
}
int64_t accelerator_allocated(bool most) { return most ? most_allocated : allocated; }
void accelerator_forget_most_allocated() { most_allocated = allocated.load(); }

void accelerator_seed(int device, uint64_t seed) { generators()[device].set_current_seed(seed); }
int64_t accelerator_generator_size() { return generators()[0].get_state().numel(); }
void accelerator_get_generator(int device, uint8_t* state) {
  auto now = generators()[device].get_state();
  std::memcpy(state, now.data_ptr(), now.nbytes());
}
void accelerator_set_generator(int device, uint8_t* state) {
  generators()[device].set_state(at::from_blob(state, {accelerator_generator_size()}, at::kByte));
}
}
