// A simulated accelerator `sim`: its memory is the host's, its kernels are the CPU's, and what makes programs wrong on a real
// device is as on a real one.
//
//   streams     a copy of another stream than the default one runs as late as is legal: when something is told to come after it
//   judge       vector clocks: two accesses to the same bytes, one of them a write, that no event orders are a race, whenever they ran
//   memory      what is allocated or freed is poisoned with NaN, and what is freed while a stream may still use it is a race
//   pinned      a copy between the device and host memory that is not pinned makes the host wait, as does one that is not asynchronous
//   waits       every wait of the host for the device is counted, with the operation and the thread that it was for
//
// Operators run by one boxed fallback, which gives the CPU's kernels tensors that share the device's bytes.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using Clock = std::vector<uint64_t>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr size_t kQuarantine = 64u << 20;  // Bytes that stay poisoned before the C library gets them back.

// Whoever waits here lets go of Python's lock: a thread inside may want it, since torch takes it to count references.
struct Unlocked {
  Unlocked() : state(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state) PyEval_RestoreThread(state);
  }
  void* state;
};

std::recursive_mutex lock_;

struct Locked {
  explicit Locked(std::recursive_mutex& mutex) : held(mutex, std::try_to_lock) {
    if (held) return;
    Unlocked unlocked;
    held.lock();
  }
  std::unique_lock<std::recursive_mutex> held;
};

struct Options {
  bool late = true, poison = true;
  int64_t patience = 20;  // So often a query says "not yet" of what nobody waits for.
  size_t memory = size_t(8) << 30;
  int64_t pinnable = int64_t(1) << 40;  // Bytes of the longest range that the driver pins.
} options;

// ---------------------------------------------------------------------------------------------------------------- clocks

struct StreamState {
  Clock clock;
  std::deque<std::function<void()>> pending;  // Copies, and events of other streams that come before what follows.
  uint64_t ran = 0, queued = 0;  // Counts of items of `pending` over the stream's life.
};

std::map<StreamId, StreamState> streams_;
StreamId next_stream_ = 1;
Clock host_;
thread_local DeviceIndex device_ = 0;
thread_local StreamId current_ = 0;

struct Event {
  StreamId stream = 0;
  uint64_t queued = 0;
  Clock clock;
  int asked = 0;
  std::chrono::steady_clock::time_point at;
};

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t known(const Clock& clock, StreamId stream) {
  return size_t(stream) < clock.size() ? clock[stream] : 0;
}

// Runs what is pending on a stream, up to the item of this number.
void force(StreamId id, uint64_t upto = ~uint64_t(0)) {
  auto& stream = streams_[id];
  while (!stream.pending.empty() && stream.ran < upto) {
    auto item = std::move(stream.pending.front());
    stream.pending.pop_front();
    ++stream.ran;
    item();
  }
}

void queue(StreamId id, std::function<void()> run) {
  auto& stream = streams_[id];
  stream.pending.push_back(std::move(run));
  ++stream.queued;
}

// ----------------------------------------------------------------------------------------------------------------- waits

std::vector<std::string> waits_;
std::string forbidden_;

void waited(const std::string& what) {
  waits_.push_back(std::to_string(syscall(SYS_gettid)) + " " + what);
  TORCH_CHECK(forbidden_.empty(), "the host waits for the device (", what, ") ", forbidden_);
}

// ----------------------------------------------------------------------------------------------------------------- judge

struct Access {
  StreamId stream = -1;
  uint64_t time = 0;
  std::string what;
};

struct Segment {
  uintptr_t end = 0;
  Access write;
  std::vector<Access> reads;
};

std::map<uintptr_t, Segment> segments_;
std::vector<std::string> races_;
thread_local std::string label_;

void split(uintptr_t at) {
  auto found = segments_.upper_bound(at);
  if (found == segments_.begin()) return;
  --found;
  if (found->first < at && at < found->second.end) {
    Segment right = found->second;
    found->second.end = at;
    segments_.emplace(at, std::move(right));
  }
}

void race(const std::string& now, StreamId stream, const Access& before) {
  auto text = now + " on stream " + std::to_string(stream) + " is not ordered after " + before.what + " on stream " +
              std::to_string(before.stream);
  if (races_.size() < 200) races_.push_back(text);
}

bool ordered(const Clock& clock, StreamId stream, const Access& before) {
  return before.stream < 0 || before.stream == stream || known(clock, before.stream) >= before.time;
}

void access(uintptr_t begin, uintptr_t end, StreamId stream, bool writes, const std::string& what) {
  if (begin >= end) return;
  const Clock& clock = streams_[stream].clock;
  Access own{stream, known(clock, stream), what};
  split(begin);
  split(end);
  auto at = begin;
  auto found = segments_.lower_bound(begin);
  while (at < end) {
    if (found == segments_.end() || found->first > at) {
      auto stop = found == segments_.end() ? end : std::min(end, found->first);
      found = segments_.emplace_hint(found, at, Segment{stop, {}, {}});
    }
    auto& segment = found->second;
    if (!ordered(clock, stream, segment.write)) race(what + (writes ? " (writes)" : " (reads)"), stream, segment.write);
    if (writes) {
      for (const auto& read : segment.reads)
        if (!ordered(clock, stream, read)) race(what + " (writes)", stream, read);
      segment.write = own;
      segment.reads.clear();
    } else {
      auto same = std::find_if(segment.reads.begin(), segment.reads.end(), [&](auto& r) { return r.stream == stream; });
      if (same == segment.reads.end()) segment.reads.push_back(own);
      else *same = own;
    }
    at = segment.end;
    ++found;
  }
}

// A launch on the current stream: it comes after what the stream has and what the host knows to be over.
void tick(StreamId stream) {
  auto& clock = streams_[stream].clock;
  join(clock, host_);
  if (clock.size() <= size_t(stream)) clock.resize(stream + 1);
  ++clock[stream];
}

std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {0, 0};
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data_ptr().get()) + tensor.storage_offset() * tensor.itemsize();
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

void access(const Tensor& tensor, StreamId stream, bool writes, const std::string& what) {
  auto [begin, end] = extent(tensor);
  access(begin, end, stream, writes, what);
}

// ---------------------------------------------------------------------------------------------------------------- memory

struct Block {
  size_t nbytes;
  StreamId stream;
  std::set<StreamId> users;
};

std::unordered_map<void*, Block> blocks_;
std::deque<std::pair<void*, size_t>> quarantine_;
size_t quarantined_ = 0, allocated_ = 0, peak_ = 0;

void let_go(void* memory) {
  if (memory == nullptr) return;
  Locked locked(lock_);
  auto found = blocks_.find(memory);
  auto& block = found->second;
  auto begin = reinterpret_cast<uintptr_t>(memory), end = begin + block.nbytes;
  split(begin);
  split(end);
  Clock clock = streams_[block.stream].clock;
  join(clock, host_);
  for (auto at = segments_.lower_bound(begin); at != segments_.end() && at->first < end;) {
    auto check = [&](const Access& before) {
      if (!ordered(clock, block.stream, before) && !block.users.count(before.stream)) race("freeing", block.stream, before);
    };
    check(at->second.write);
    for (const auto& read : at->second.reads) check(read);
    at = segments_.erase(at);
  }
  // The memory is used again by its stream, after what the stream is to wait for.
  if (options.poison) queue(block.stream, [memory, nbytes = block.nbytes] { std::memset(memory, 0xFF, nbytes); });
  allocated_ -= block.nbytes;
  quarantine_.emplace_back(memory, block.nbytes);
  quarantined_ += block.nbytes;
  blocks_.erase(found);
  while (quarantined_ > kQuarantine) {
    // A copy that is pending may still read what has been freed: it is to find the poison, not other people's memory.
    for (auto& [id, stream] : streams_) force(id);
    std::free(quarantine_.front().first);
    quarantined_ -= quarantine_.front().second;
    quarantine_.pop_front();
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(kSim, device_);
    if (nbytes == 0) return {nullptr, nullptr, &let_go, device};
    Locked locked(lock_);
    if (allocated_ + nbytes > options.memory)
      C10_THROW_ERROR(OutOfMemoryError, "simulated device out of memory: " + std::to_string(nbytes) + " bytes asked for");
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, nbytes) == 0, "the host has no memory for the simulated device");
    if (options.poison) std::memset(memory, 0xFF, nbytes);
    auto begin = reinterpret_cast<uintptr_t>(memory);
    split(begin);
    split(begin + nbytes);
    segments_.erase(segments_.lower_bound(begin), segments_.lower_bound(begin + nbytes));
    blocks_[memory] = {nbytes, current_, {}};
    allocated_ += nbytes;
    peak_ = std::max(peak_, allocated_);
    return {memory, memory, &let_go, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Locked locked(lock_);
    auto found = blocks_.find(pointer.get());
    if (found != blocks_.end()) found->second.users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*each)[0].current = allocated_;
      (*each)[0].peak = peak_;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak_ = allocated_; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {options.memory - allocated_, options.memory}; }
};

Allocator allocator_;
REGISTER_ALLOCATOR(kSim, &allocator_);

// ---------------------------------------------------------------------------------------------------------------- pinned

std::map<uintptr_t, uintptr_t> pinned_;  // Begin and end of ranges of host memory.

bool is_pinned(uintptr_t begin, uintptr_t end) {
  auto found = pinned_.upper_bound(begin);
  return found != pinned_.begin() && std::prev(found)->second >= end;
}

void unpin(uintptr_t begin) {
  for (auto& [id, stream] : streams_)
    if (!stream.pending.empty()) {
      // The memory goes: whoever still copies would copy from or to nothing.
      force(id);
    }
  auto found = pinned_.find(begin);
  if (found == pinned_.end()) return;
  split(found->first);
  split(found->second);
  Clock clock = streams_[0].clock;
  join(clock, host_);
  for (auto at = segments_.lower_bound(found->first); at != segments_.end() && at->first < found->second;) {
    if (!ordered(host_, -1, at->second.write)) race("unpinning", -1, at->second.write);
    for (const auto& read : at->second.reads)
      if (!ordered(host_, -1, read)) race("unpinning", -1, read);
    at = segments_.erase(at);
  }
  pinned_.erase(found);
}

// torch's own pinned memory is not used again before the copies that torch has launched are done, and nobody waits for that.
struct Parked {
  void* memory;
  std::map<StreamId, uint64_t> queued;
};
std::vector<Parked> parked_;

void free_parked() {
  std::erase_if(parked_, [](const Parked& each) {
    for (auto& [id, queued] : each.queued)
      if (streams_[id].ran < queued) return false;
    auto found = pinned_.find(reinterpret_cast<uintptr_t>(each.memory));
    split(found->first);
    split(found->second);
    segments_.erase(segments_.lower_bound(found->first), segments_.lower_bound(found->second));
    pinned_.erase(found);
    std::free(each.memory);
    return true;
  });
}

void free_pinned(void* memory) {
  Locked locked(lock_);
  Parked parked{memory, {}};
  for (auto& [id, stream] : streams_) parked.queued[id] = stream.queued;
  parked_.push_back(std::move(parked));
  free_parked();
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    Locked locked(lock_);
    void* memory = nullptr;
    free_parked();
    TORCH_CHECK(posix_memalign(&memory, 4096, nbytes) == 0, "the host has no memory to pin");
    auto begin = reinterpret_cast<uintptr_t>(memory);
    pinned_[begin] = begin + nbytes;
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
} pinned_allocator_;

bool refused_ = false;  // The error of a call stays with the driver until a launch finds it.

int64_t register_host(int64_t address, int64_t nbytes) {
  Locked locked(lock_);
  if (nbytes > options.pinnable) {
    refused_ = true;
    return 2;  // Out of memory.
  }
  auto begin = uintptr_t(address);
  if (pinned_.count(begin)) return 712;  // As CUDA says of memory that is pinned already.
  pinned_[begin] = begin + nbytes;
  return 0;
}

int64_t unregister_host(int64_t address) {
  Locked locked(lock_);
  unpin(uintptr_t(address));
  return 0;
}

// ------------------------------------------------------------------------------------------------------------- generator

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(Device(kSim, index), c10::DispatchKeySet(kKey)), cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->cpu = cpu.clone();
    return made;
  }
  at::Generator cpu;
};

at::Generator& default_generator(DeviceIndex index) {
  static std::map<DeviceIndex, at::Generator> made;
  index = index < 0 ? device_ : index;
  if (!made.count(index)) made.emplace(index, at::make_generator<Generator>(index));
  return made.at(index);
}

at::Generator& cpu_of(at::Generator& generator) { return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu; }

// ----------------------------------------------------------------------------------------------------- guard and hooks

DeviceIndex device_count() {
  static const auto* text = std::getenv("SIM_DEVICES");
  return text ? DeviceIndex(std::atoi(text)) : DeviceIndex(8);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    auto before = device_;
    device_ = device.index();
    return {kSim, before};
  }
  Device getDevice() const override { return {kSim, device_}; }
  void setDevice(Device device) const override { device_ = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { device_ = device.index(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::UNSAFE, device, current_); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, device, 0); }
  Stream getNewStream(Device device, int) const override {
    Locked locked(lock_);
    return Stream(Stream::UNSAFE, Device(kSim, device.index() < 0 ? device_ : device.index()), next_stream_++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = current_;
    current_ = stream.id();
    return Stream(Stream::UNSAFE, stream.device(), before);
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(lock_);
    auto* made = static_cast<Event*>(*event);
    if (made == nullptr) *event = made = new Event();
    auto& state = streams_[stream.id()];
    join(state.clock, host_);
    *made = {stream.id(), state.queued, state.clock, 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    Locked locked(lock_);
    Event known_ = *static_cast<Event*>(event);
    join(streams_[stream.id()].clock, known_.clock);
    queue(stream.id(), [known_] { force(known_.stream, known_.queued); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    // A query never waits, though another thread may stand in a collective that does not end.
    std::unique_lock<std::recursive_mutex> locked(lock_, std::try_to_lock);
    if (!locked) return false;
    auto* asked = static_cast<Event*>(event);
    if (streams_[asked->stream].ran < asked->queued) {
      if (++asked->asked < options.patience) return false;
      force(asked->stream, asked->queued);
    }
    join(host_, asked->clock);
    return true;
  }
  bool queryStream(const Stream& stream) const override {
    std::unique_lock<std::recursive_mutex> locked(lock_, std::try_to_lock);
    if (!locked) return false;
    return streams_[stream.id()].pending.empty();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Locked locked(lock_);
    waited("an event");
    auto* ended = static_cast<Event*>(event);
    force(ended->stream, ended->queued);
    join(host_, ended->clock);
  }
  void synchronizeStream(const Stream& stream) const override {
    Locked locked(lock_);
    waited("a stream");
    force(stream.id());
    join(host_, streams_[stream.id()].clock);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Locked locked(lock_);
    waited("the device");
    for (auto& [id, stream] : streams_) {
      force(id);
      join(host_, stream.clock);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator_.recordStream(pointer, stream);
  }
  double elapsedTime(void* one, void* other, const DeviceIndex) const override {
    auto between = static_cast<Event*>(other)->at - static_cast<Event*>(one)->at;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  Device getDeviceFromPtr(void*) const override { return {kSim, device_}; }
  bool isPinnedPtr(const void* data) const override {
    Locked locked(lock_);
    auto begin = reinterpret_cast<uintptr_t>(data);
    return is_pinned(begin, begin + 1);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator_; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex index) const override { device_ = index; }
  DeviceIndex getCurrentDevice() const override { return device_; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(device_, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(device_, index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto fresh = allocator_.allocate(nbytes);
    auto kept = std::min(nbytes, storage.nbytes());
    if (kept) std::memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// ------------------------------------------------------------------------------------------------------------- operators

// A CPU tensor that shares the bytes of a tensor of the device.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSim) return tensor;
  auto [begin, end] = extent(tensor);
  auto base = reinterpret_cast<uintptr_t>(tensor.storage().data_ptr().get());
  TORCH_CHECK(
      begin == end || end <= base + tensor.storage().nbytes(), "the memory of a tensor ", tensor.sizes(), " was given back");
  c10::DataPtr data(tensor.storage().data_ptr().get(), c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator_, c10::DispatchKeySet(kKey), dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &allocator_, c10::DispatchKeySet(kKey), dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

// What a copy needs when it runs: addresses, as a device has them, and nothing that keeps memory alive.
struct Side {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  static Side of(const Tensor& tensor) {
    return {reinterpret_cast<void*>(extent(tensor).first), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
  }
  Tensor tensor() const { return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype)); }
};

Tensor copy_from(const Tensor& source, const Tensor& target, bool asynchronous) {
  Locked locked(lock_);
  auto stream = current_;
  bool out = target.device().is_cpu(), in = source.device().is_cpu();
  if (source.numel() == 0) return target;
  // Broadcasting, and copies between other layouts, as torch's own copy has them.
  auto from = source.expand_as(target);
  const auto& host = out ? target : source;
  auto [begin, end] = (in || out) ? extent(host) : std::pair<uintptr_t, uintptr_t>{0, 0};
  bool pinned = (in || out) && is_pinned(begin, end);
  tick(stream);
  std::string what = in ? "copy in" : out ? "copy out" : "copy";
  host_view(target);
  host_view(source);
  if (pinned || !in) access(source, stream, false, what);
  if (pinned || !out) access(target, stream, true, what);
  auto run = [read = Side::of(from), written = Side::of(target)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    written.tensor().copy_(read.tensor());
  };
  bool waits = (in || out) && (!asynchronous || (out && !pinned));
  if (in && !pinned && !waits) {  // The driver takes the bytes before it returns.
    force(stream);
    run();
    return target;
  }
  queue(stream, run);
  if (stream == 0 || !options.late) force(stream);
  if (waits) {
    waited(what + (asynchronous ? " of pageable memory" : ""));
    force(stream);
    join(host_, streams_[stream].clock);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Locked locked(lock_);
  waited("item");
  force(current_);
  tick(current_);
  access(tensor, current_, false, "item");
  join(host_, streams_[current_].clock);
  return host_view(tensor).item();
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto wanted = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->unsafe_storage().nbytes() < size_t(wanted))
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->unsafe_storage(), wanted);
  return tensor;
}

Tensor strided_view(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
  return made;
}

Tensor view(const Tensor& self, at::IntArrayRef sizes) {
  auto inferred = at::infer_size(sizes, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with the tensor's size and stride; use reshape");
  return strided_view(self, inferred, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return strided_view(self, sizes, strides, self.storage_offset());
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  auto like = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kMeta)).unfold(dimension, size, step);
  return strided_view(self, like.sizes(), like.strides(), self.storage_offset() + like.storage_offset());
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

Tensor& set_whole(Tensor& self, c10::Storage storage) {
  auto count = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, Stream stream) { allocator_.recordStream(self.storage().data_ptr(), stream); }

// Operators whose results have a size that only the device knows, so that the host waits for them.
const std::set<std::string> kSized = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal", "aten::nonzero_static"};
// Operators that take indices from the host.
const std::set<std::string> kIndexed = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto count = schema.arguments().size(), begin = stack->size() - count;
  auto stream = current_;
  Locked locked(lock_);
  TORCH_CHECK(!std::exchange(refused_, false), "simulated device: an earlier call has failed and nobody has asked for its error");
  force(stream);  // Only copies wait on a stream; what is computed there comes after them.
  tick(stream);
  std::string what = name + (label_.empty() ? "" : " in " + label_);
  std::vector<std::pair<Tensor, Tensor>> pairs;  // The device's tensors and what the kernel gets for them.
  bool foreign = false, sized = kSized.count(name) > 0;
  auto swap = [&](const Tensor& tensor, bool writes) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kSim) {
      foreign |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    pairs.emplace_back(tensor, host_view(tensor));
    access(tensor, stream, writes, what);
    return pairs.back().second;
  };
  at::Generator* drawn = nullptr;
  bool asks = false;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = swap(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(swap(each, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector()) {
        // A mask says how many elements there are; whole numbers do not.
        sized |= each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte);
        list.push_back(each ? std::optional<Tensor>(swap(*each, writes)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      value = Device(at::kCPU);
    } else if (value.isGenerator()) {
      auto given = value.toGenerator();
      if (given.device().type() == kSim) value = cpu_of(given);
      asks = true;
    } else if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) {
      drawn = &default_generator(-1);
      value = cpu_of(*drawn);
      asks = true;
    }
  }
  TORCH_CHECK(
      !foreign || kIndexed.count(name), name, ": expected all tensors to be on the same device, but found sim and cpu");
  bool counts = name == "aten::histc" && !at::isFloatingType(pairs.front().second.scalar_type());
  if (counts) (*stack)[begin] = pairs.front().second.to(at::kFloat);  // A device counts integers, the CPU does not.
  // An operator that draws without a generator among its arguments takes the default one of the CPU, which lends its place.
  bool lends = !asks && std::find(op.getTags().begin(), op.getTags().end(), at::Tag::nondeterministic_seeded) != op.getTags().end();
  auto host_default = at::detail::getDefaultCPUGenerator();
  c10::intrusive_ptr<c10::TensorImpl> kept;
  if (lends) {
    kept = host_default.unsafeGetGeneratorImpl()->get_state();
    host_default.unsafeGetGeneratorImpl()->set_state(*cpu_of(default_generator(-1)).unsafeGetGeneratorImpl()->get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (lends) {
    cpu_of(default_generator(-1)).unsafeGetGeneratorImpl()->set_state(*host_default.unsafeGetGeneratorImpl()->get_state());
    host_default.unsafeGetGeneratorImpl()->set_state(*kept);
  }
  if (counts) stack->back() = stack->back().toTensor().to(pairs.front().first.scalar_type());
  auto back = [&](const Tensor& made) -> Tensor {
    if (!made.defined()) return made;
    for (auto& [own, lent] : pairs) {
      if (made.is_same(lent)) {
        if (own.sizes() != lent.sizes()) {
          own.resize_(lent.sizes());
          std::memcpy(own.mutable_data_ptr(), lent.contiguous().data_ptr(), lent.nbytes());
        }
        return own;
      }
      if (made.storage().nbytes() && made.storage().data() == lent.storage().data())
        return strided_view(own, made.sizes(), made.strides(), made.storage_offset());
    }
    auto fresh = at::empty_strided(made.sizes(), made.strides(), made.options().device(Device(kSim, device_)));
    host_view(fresh).copy_(made);
    access(fresh, stream, true, what);
    return fresh;
  };
  auto results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(back(each));
      value = list;
    } else {
      sized = true;
    }
  }
  if (sized) {
    waited(name);
    join(host_, streams_[stream].clock);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "native_dropout"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// -------------------------------------------------------------------------------------------------- what the tests ask

void touch(at::TensorList reads, at::TensorList writes, std::string what) {
  Locked locked(lock_);
  force(current_);
  tick(current_);
  for (const auto& each : reads) access(each, current_, false, what);
  for (const auto& each : writes) access(each, current_, true, what);
}

c10::List<std::string> listed(const std::vector<std::string>& texts) {
  c10::List<std::string> list;
  for (const auto& each : texts) list.push_back(each);
  return list;
}

c10::List<std::string> races() {
  Locked locked(lock_);
  return listed(races_);
}

c10::List<std::string> waits() {
  Locked locked(lock_);
  return listed(waits_);
}

void clear() {
  Locked locked(lock_);
  races_.clear();
  waits_.clear();
}

void forbid(std::string why) {
  Locked locked(lock_);
  forbidden_ = why;
}

void set(std::string option, int64_t value) {
  Locked locked(lock_);
  if (option == "late") options.late = value;
  else if (option == "poison") options.poison = value;
  else if (option == "memory") options.memory = value;
  else if (option == "patience") options.patience = value;
  else if (option == "pinnable") options.pinnable = value;
  else TORCH_CHECK(false, "no option ", option);
}

void label(std::string text) { label_ = text; }

// What a collective brings is there once its work is done, and something comes after it. A group that was aborted brings nothing.
std::set<int64_t> aborted_;
std::mutex abort_lock_;

bool is_aborted(int64_t group) {
  std::lock_guard<std::mutex> locked(abort_lock_);
  return aborted_.count(group) > 0;
}

void abort_group(int64_t group) {
  std::lock_guard<std::mutex> locked(abort_lock_);
  aborted_.insert(group);
}

void arrive(
    const c10::intrusive_ptr<c10d::Work>& work, at::TensorList sources, at::TensorList targets, int64_t group, bool tells) {
  Locked locked(lock_);
  std::vector<Side> written;
  for (const auto& each : targets) written.push_back(Side::of(each));
  queue(current_, [work, kept = sources.vec(), written, group, tells] {
    Unlocked unlocked;
    while (tells && !work->isCompleted()) {  // gloo's messages do not tell.
      TORCH_CHECK(!is_aborted(group), "simccl: the communicator was aborted");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    work->wait();
    at::AutoDispatchBelowADInplaceOrView guard;
    for (size_t i = 0; i < written.size(); ++i) written[i].tensor().copy_(kept[i]);
  });
}

TORCH_LIBRARY(sim, m) {
  m.def("alias(Tensor tensor) -> Tensor", host_view);
  m.def("touch(Tensor[] reads, Tensor[] writes, str what) -> ()", touch);
  m.def("races() -> str[]", races);
  m.def("waits() -> str[]", waits);
  m.def("clear() -> ()", clear);
  m.def("seed(int number) -> ()", [](int64_t number) { 
    for (DeviceIndex each = 0; each < device_count(); ++each) default_generator(each).set_current_seed(number);
  });
  m.def("generator_state() -> Tensor", [] { return default_generator(-1).get_state(); });
  m.def("set_generator_state(Tensor state) -> ()", [](const Tensor& state) { default_generator(-1).set_state(state); });
  m.def("count() -> int", [] { return int64_t(device_count()); });
  m.def("forbid(str why) -> ()", forbid);
  m.def("set(str option, int value) -> ()", set);
  m.def("label(str text) -> ()", label);
  m.def(
      "arrive(__torch__.torch.classes.c10d.Work work, Tensor[] sources, Tensor[] targets, int group, bool tells) -> ()", arrive);
  m.def("abort_group(int group) -> ()", abort_group);
  m.def("register_host(int address, int nbytes) -> int", register_host);
  m.def("unregister_host(int address) -> int", unregister_host);
}

struct AtStart {
  AtStart() {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} at_start_;

}  // namespace
