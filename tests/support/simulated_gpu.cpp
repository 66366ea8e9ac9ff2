// A simulated CUDA device for a CPU build of torch: streams, events, caches, and late copies.
//
// It fills what such a build leaves empty: the dispatch key, the device guard, the allocators and
// the hooks of CUDA. Memory of the device is host memory. Kernels run when they are called, after
// what is before them on their stream. Copies that CUDA makes asynchronously are tasks in the queue
// of a stream: in mode 0, "late", they run when somebody waits for them and no sooner, in mode 1,
// "eager", at once, in mode 2, "random", at moments that a seeded generator draws. Freed memory is
// handed out again at once, and overwritten in the order of the stream that it belongs to, so that
// whoever reads or writes it out of order is found out.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
static std::recursive_mutex lock;
#define HOLD_LOCK std::lock_guard<std::recursive_mutex> _lk(lock)
static int mode = 0;  // 0 late, 1 eager, 2 random
static int device_count = 2;
static size_t capacity = size_t(4) << 30;
static std::mt19937 generator(0);
static long async_copies = 0, sync_copies = 0, tasks_run = 0, blocks_overwritten = 0;

// --- streams: queues of tasks; a point is an event in one of them --------------------------------

struct SimStream;

struct Point {
  bool done = false;
  SimStream* stream = nullptr;
};

using PointPtr = std::shared_ptr<Point>;

struct Task {
  int kind;  // 0 work, 1 record the point, 2 wait for the point
  std::function<void()> run;
  PointPtr point;
};

struct SimStream {
  int dev;
  int64_t id;
  std::deque<Task> q;
};

static std::map<std::pair<int, int64_t>, SimStream*> streams;

static SimStream* stream_of(int dev, int64_t id) {
  auto& s = streams[{dev, id}];
  if (!s) {
    s = new SimStream{dev, id};
  }
  return s;
}

static void run_until(const PointPtr& p);

// Runs the first task of a stream, and whatever that task waits for.
static void run_front(SimStream* s) {
  TORCH_CHECK(!s->q.empty(), "simulated GPU: nothing to run");
  if (s->q.front().kind == 2 && !s->q.front().point->done) run_until(s->q.front().point);
  if (s->q.empty()) return;
  Task t = std::move(s->q.front());
  s->q.pop_front();
  if (t.kind == 0) {
    tasks_run++;
    t.run();
  } else if (t.kind == 1)
    t.point->done = true;
}

static void run_until(const PointPtr& p) {
  while (!p->done) run_front(p->stream);
}

static void drain(SimStream* s) {
  while (!s->q.empty()) run_front(s);
}

static void drain_all(int dev) {
  for (auto& [k, s] : streams)
    if (dev < 0 || k.first == dev) drain(s);
}

// In mode "random", runs some tasks of some streams, as a device may at any moment.
static void run_some() {
  if (mode == 0) return;
  if (mode == 1) {
    drain_all(-1);
    return;
  }
  std::vector<SimStream*> all;
  for (auto& [k, s] : streams) all.push_back(s);
  std::shuffle(all.begin(), all.end(), generator);
  for (auto* s : all) {
    if (generator() % 3) continue;
    int n = generator() % 4;
    while (n-- > 0 && !s->q.empty() && !(s->q.front().kind == 2 && !s->q.front().point->done))
      run_front(s);
  }
}

static void enqueue(SimStream* s, std::function<void()> f) {
  s->q.push_back({0, std::move(f), nullptr});
  run_some();
}

static thread_local int current_index = 0;
static thread_local std::map<int, int64_t> current_streams;

static SimStream* current(int dev) {
  return stream_of(dev, current_streams.count(dev) ? current_streams[dev] : 0);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }

  Device exchangeDevice(Device d) const override {
    auto o = getDevice();
    setDevice(d);
    return o;
  }

  Device getDevice() const override { return Device(c10::kCUDA, current_index); }

  void setDevice(Device d) const override {
    if (d.index() < 0) return;
    TORCH_CHECK(d.index() < device_count, "CUDA error: invalid device ordinal");
    current_index = d.index();
  }

  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_index = d.index();
  }

  static Stream make(SimStream* s) {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, s->dev), s->id);
  }

  static int idx(Device d) { return d.index() < 0 ? current_index : d.index(); }

  static SimStream* sim(const Stream& s) { return stream_of(s.device_index(), s.id()); }

  Stream getStream(Device d) const override {
    HOLD_LOCK;
    return make(current(idx(d)));
  }

  Stream getDefaultStream(Device d) const override {
    HOLD_LOCK;
    return make(stream_of(idx(d), 0));
  }

  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }

  Stream getNewStream(Device d, int) const override {
    HOLD_LOCK;  // a pool of 32 that goes round, as CUDA's
    static int64_t turn = 0;
    return make(stream_of(idx(d), 1 + (turn++ % 32)));
  }

  Stream exchangeStream(Stream s) const override {
    HOLD_LOCK;
    auto o = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return o;
  }

  void destroyEvent(void* e, const DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(e);
  }

  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    HOLD_LOCK;
    auto p = std::make_shared<Point>();
    p->stream = sim(s);
    p->stream->q.push_back({1, nullptr, p});
    if (*e)
      *static_cast<PointPtr*>(*e) = p;
    else
      *e = new PointPtr(p);
    run_some();
  }

  void block(void* e, const Stream& s) const override {
    HOLD_LOCK;
    if (!e) return;
    sim(s)->q.push_back({2, nullptr, *static_cast<PointPtr*>(e)});
    run_some();
  }

  bool queryEvent(void* e) const override {
    HOLD_LOCK;
    if (!e) return true;
    run_some();
    return (*static_cast<PointPtr*>(e))->done;
  }

  void synchronizeEvent(void* e) const override {
    HOLD_LOCK;
    if (e) run_until(*static_cast<PointPtr*>(e));
    run_some();
  }

  DeviceIndex deviceCount() const noexcept override { return device_count; }

  bool queryStream(const Stream& s) const override {
    HOLD_LOCK;
    run_some();
    return sim(s)->q.empty();
  }

  void synchronizeStream(const Stream& s) const override {
    HOLD_LOCK;
    drain(sim(s));
    run_some();
  }

  void synchronizeDevice(const DeviceIndex d) const override {
    HOLD_LOCK;
    drain_all(d < 0 ? current_index : d);
  }

  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override;
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- memory of the device
struct Block {
  char* p;
  size_t size;
  int dev;
  SimStream* s;
  std::vector<SimStream*> uses;
  std::vector<PointPtr> points;
};

struct DevAlloc final : c10::DeviceAllocator {
  std::map<std::tuple<int, SimStream*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
  std::map<char*, Block*> live_;
  std::map<int, std::pair<size_t, size_t>> bytes_;  // now, peak

  void poison(Block* b) {
    blocks_overwritten++;
    auto p = b->p;
    auto n = b->size;
    enqueue(b->s, [p, n] { std::memset(p, 0xDB, n); });
  }

  void reap() {
    std::vector<Block*> keep;
    for (auto* b : pending_) {
      bool ok = true;
      for (auto& p : b->points) ok &= p->done;
      if (!ok) {
        keep.push_back(b);
        continue;
      }
      b->points.clear();
      b->uses.clear();
      poison(b);
      free_[{b->dev, b->s, b->size}].push_back(b);
    }
    pending_ = keep;
  }

  c10::DataPtr allocate(size_t n) override {
    HOLD_LOCK;
    Device d(c10::kCUDA, current_index);
    if (!n) return {nullptr, nullptr, &DevAlloc::release, d};
    size_t size = (n + 511) / 512 * 512;
    auto* s = current(current_index);
    auto& st = bytes_[current_index];
    if (size > capacity || st.first + size > capacity)
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", size,
                                                 " bytes (simulated)."));
    reap();
    auto& list = free_[{current_index, s, size}];
    Block* b;
    if (!list.empty()) {
      b = list.back();
      list.pop_back();
    } else {
      b = new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, current_index, s};
      std::memset(b->p, 0xDB, size);
    }
    live_[b->p] = b;
    st.first += size;
    st.second = std::max(st.second, st.first);
    return {b->p, b, &DevAlloc::release, d};
  }

  static void release(void* ctx);

  Block* find(const void* p) {
    auto it = live_.upper_bound((char*)p);
    if (it == live_.begin()) return nullptr;
    --it;
    return (char*)p < it->first + it->second->size ? it->second : nullptr;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &DevAlloc::release; }

  void copy_data(void* to, const void* from, size_t n) const override {
    HOLD_LOCK;
    enqueue(current(current_index), [=] { std::memcpy(to, from, n); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& p, Stream s) override {
    HOLD_LOCK;
    if (auto* b = find(p.get())) {
      auto* t = Guard::sim(s);
      if (t != b->s) b->uses.push_back(t);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }

  void resetAccumulatedStats(DeviceIndex) override {}

  void resetPeakStats(DeviceIndex d) override { bytes_[d].second = bytes_[d].first; }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    return {capacity - bytes_[d].first, capacity};
  }
};

static DevAlloc* device_allocator = new DevAlloc;

void DevAlloc::release(void* ctx) {
  if (!ctx) return;
  HOLD_LOCK;
  auto* b = static_cast<Block*>(ctx);
  device_allocator->live_.erase(b->p);
  device_allocator->bytes_[b->dev].first -= b->size;
  if (b->uses.empty()) {
    device_allocator->poison(b);
    device_allocator->free_[{b->dev, b->s, b->size}].push_back(b);
    return;
  }
  for (auto* s : b->uses) {
    auto p = std::make_shared<Point>();
    p->stream = s;
    s->q.push_back({1, nullptr, p});
    b->points.push_back(p);
  }
  device_allocator->pending_.push_back(b);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const {
  device_allocator->recordStream(p, s);
}

struct SetIt {
  SetIt() { c10::SetAllocator(c10::kCUDA, device_allocator, 10); }
} set_it;

// --- pinned memory: as torch's cache, it is handed out again when the copies that use it are done
struct Pinned {
  char* p;
  size_t size;
  int uses = 0;
  bool freed = false;
};

static std::map<char*, Pinned*> pinned_blocks;
static std::map<size_t, std::vector<Pinned*>> pinned_free;

static Pinned* pinned(const void* q) {
  auto it = pinned_blocks.upper_bound((char*)q);
  if (it == pinned_blocks.begin()) return nullptr;
  --it;
  return (char*)q < it->first + it->second->size && !it->second->freed ? it->second : nullptr;
}

static void give_back_pinned(Pinned* b) {
  std::memset(b->p, 0xEE, b->size);
  pinned_free[b->size].push_back(b);
}

struct HostAlloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    HOLD_LOCK;
    if (!n) return {nullptr, nullptr, &HostAlloc::release, c10::kCPU};
    size_t size = 512;
    while (size < n) size *= 2;
    auto& l = pinned_free[size];
    Pinned* b;
    if (!l.empty()) {
      b = l.back();
      l.pop_back();
      b->freed = false;
    } else {
      b = new Pinned{static_cast<char*>(std::aligned_alloc(512, size)), size};
      std::memset(b->p, 0xEE, size);
      pinned_blocks[b->p] = b;
    }
    return {b->p, b, &HostAlloc::release, c10::kCPU};
  }

  static void release(void* c) {
    if (!c) return;
    HOLD_LOCK;
    auto* b = static_cast<Pinned*>(c);
    b->freed = true;
    if (!b->uses) give_back_pinned(b);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &HostAlloc::release; }

  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

static HostAlloc host_allocator;

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}

  void init() const override {}

  bool isBuilt() const override { return true; }

  bool isAvailable() const override { return true; }

  bool hasCUDA() const override { return true; }

  bool hasCUDART() const override { return true; }

  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  int getNumGPUs() const override { return device_count; }

  DeviceIndex deviceCount() const override { return device_count; }

  DeviceIndex current_device() const override { return current_index; }

  DeviceIndex getCurrentDevice() const override { return current_index; }

  void setCurrentDevice(DeviceIndex d) const override { current_index = d; }

  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = current_index;
    current_index = d;
    return o;
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto o = current_index;
    if (d >= 0) current_index = d;
    return o;
  }

  bool isPinnedPtr(const void* p) const override {
    HOLD_LOCK;
    return pinned(p) != nullptr;
  }

  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }

  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator; }

  Device getDeviceFromPtr(void* p) const override {
    HOLD_LOCK;
    auto* b = device_allocator->find(p);
    return Device(c10::kCUDA, b ? b->dev : 0);
  }

  void deviceSynchronize(DeviceIndex d) const override {
    HOLD_LOCK;
    drain_all(d);
  }
};
}  // namespace at

// torch has asked for the hooks while it was imported, and keeps those that do nothing: they get
// ours
static at::CUDAHooks* our_hooks = new at::CUDAHooks(at::CUDAHooksArgs{});

static void take_over() {
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(theirs) = *reinterpret_cast<void**>(our_hooks);
}

// --- operations
static constexpr c10::DispatchKeySet key_set(c10::DispatchKey::CUDA);

struct OnDevice {
  int old;

  OnDevice(std::optional<Device> d) : old(current_index) {
    if (d && d->index() >= 0) {
      TORCH_CHECK(d->index() < device_count, "CUDA error: invalid device ordinal");
      current_index = d->index();
    }
  }

  ~OnDevice() { current_index = old; }
};

static Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> t,
                    std::optional<c10::Layout>, std::optional<Device> d, std::optional<bool>,
                    std::optional<c10::MemoryFormat> m) {
  OnDevice g(d);
  return at::detail::empty_generic(size, device_allocator, key_set, c10::dtype_or_default(t), m);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef st,
                            std::optional<c10::ScalarType> t, std::optional<c10::Layout>,
                            std::optional<Device> d, std::optional<bool>) {
  OnDevice g(d);
  return at::detail::empty_strided_generic(size, st, device_allocator, key_set,
                                           c10::dtype_or_default(t));
}

static Tensor as_strided(const Tensor& s, c10::IntArrayRef a, c10::IntArrayRef b,
                         std::optional<int64_t> o) {
  return at::native::as_strided_tensorimpl(s, a, b, o);
}

static Tensor view(const Tensor& s, c10::IntArrayRef a) {
  return at::native::view(s, a);
}

static Tensor reshape_alias(const Tensor& s, c10::IntArrayRef a, c10::IntArrayRef b) {
  return at::native::_reshape_alias(s, a, b);
}

static const Tensor& resize(const Tensor& s, c10::IntArrayRef a,
                            std::optional<at::MemoryFormat> m) {
  OnDevice g(s.device());
  return at::native::resize_(s, a, m);
}

static Tensor& set_tensor(Tensor& s, const Tensor& o) {
  return at::native::set_tensor_(s, o);
}

static Tensor& set_storage(Tensor& s, at::Storage o) {
  return at::native::set_(s, o);
}

static Tensor& set_offset(Tensor& s, at::Storage o, int64_t at, c10::IntArrayRef a,
                          c10::IntArrayRef b) {
  return at::cpu::set_(s, o, at, a, b);
}

struct Flat {
  void* p;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType t;
  bool conj, neg;
};

static Flat flat(const Tensor& t) {
  return {t.numel() ? (char*)t.storage().mutable_data() + t.storage_offset() * t.element_size()
                    : nullptr,
          t.sizes().vec(),
          t.strides().vec(),
          t.scalar_type(),
          t.is_conj(),
          t.is_neg()};
}

static Tensor host(const Flat& f) {
  auto t = at::from_blob(f.p, f.sizes, f.strides, at::TensorOptions().dtype(f.t));
  t._set_conj(f.conj);
  t._set_neg(f.neg);
  return t;
}

static void run_copy(const Flat& to, const Flat& from) {
  c10::impl::ExcludeDispatchKeyGuard no_py(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  at::AutoDispatchBelowADInplaceOrView below;
  auto a = host(to), b = host(from);
  if (to.t == from.t && !to.conj && !to.neg && !from.conj && !from.neg &&
      to.strides == from.strides && a.is_non_overlapping_and_dense())
    std::memcpy(to.p, from.p, a.numel() * a.element_size());
  else
    a.copy_(b);
}

// Nothing may touch a Tensor that Python knows while lock is held: its reference count takes the
// GIL.
static Tensor& copy_(Tensor& self, const Tensor& src_, bool non_blocking) {
  if (!self.numel()) return self;
  Tensor src = src_.expand(self.sizes()), kept;
  Flat to = flat(self), from = flat(src);
  const bool up = self.is_cuda(), same = self.device() == src.device();
  const int to_index = up ? self.get_device() : -1,
            from_index = src.is_cuda() ? src.get_device() : -1;
  const void* end = up ? src.storage().data() : self.storage().data();
  bool is_pin;
  {
    HOLD_LOCK;
    is_pin = pinned(end) != nullptr;
  }
  if (to_index < 0 || from_index < 0)
    if (non_blocking && up && !is_pin)
      kept = host(from).clone();  // pageable: the driver has read it
  auto keep = std::make_shared<Tensor>(kept);
  HOLD_LOCK;
  if (to_index >= 0 && from_index >= 0) {
    async_copies++;
    if (same) {
      enqueue(current(to_index), [=] { run_copy(to, from); });
      return self;
    }
    auto *a = current(to_index), *b = current(from_index);  // as torch does between peers
    auto p = std::make_shared<Point>();
    p->stream = a;
    a->q.push_back({1, nullptr, p});
    b->q.push_back({2, nullptr, p});
    enqueue(b, [=] { run_copy(to, from); });
    auto r = std::make_shared<Point>();
    r->stream = b;
    b->q.push_back({1, nullptr, r});
    a->q.push_back({2, nullptr, r});
    return self;
  }
  auto* s = current(up ? to_index : from_index);
  auto* pin = pinned(end);
  if (non_blocking && pin) {
    async_copies++;
    pin->uses++;
    enqueue(s, [=] {
      run_copy(to, from);
      if (--pin->uses == 0 && pin->freed) give_back_pinned(pin);
    });
    return self;
  }
  if (keep->defined()) {
    Flat k = flat(*keep);
    async_copies++;
    enqueue(s, [=] {
      run_copy(to, k);
      (void)keep;
    });
    return self;
  }
  sync_copies++;
  drain(s);
  run_copy(to, from);
  run_some();
  return self;
}

static Tensor copy_from(const Tensor& self, const Tensor& dst, bool nb) {
  Tensor d = dst;
  d.copy_(self, nb);
  return dst;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  Tensor d = dst;
  d.copy_(self, false);
  return dst;
}

static at::Scalar item(const Tensor& s) {
  auto f = flat(s);
  int d = s.get_device();
  HOLD_LOCK;
  drain(current(d));
  auto r = at::native::_local_scalar_dense_cpu(host(f));
  run_some();
  return r;
}

static void record_stream(Tensor& s, Stream st) {
  device_allocator->recordStream(s.storage().data_ptr(), st);
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, false);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_offset);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  take_over();
  m.def("setup", [](int mode, int seed, int ndev, size_t cap) {
    HOLD_LOCK;
    mode = mode;
    generator.seed(seed);
    device_count = ndev;
    capacity = cap;
  });
  m.def("allocated", [](int d) {
    HOLD_LOCK;
    return device_allocator->bytes_[d].first;
  });
  m.def("peak", [](int d) {
    HOLD_LOCK;
    return device_allocator->bytes_[d].second;
  });
  m.def("reset_peak", [](int d) {
    HOLD_LOCK;
    device_allocator->bytes_[d].second = device_allocator->bytes_[d].first;
  });
  m.def("mem_info", [](int d) {
    HOLD_LOCK;
    return std::make_pair(capacity - device_allocator->bytes_[d].first, capacity);
  });
  m.def("counts", [] {
    return std::map<std::string, long>{{"async", async_copies},
                                       {"sync", sync_copies},
                                       {"tasks", tasks_run},
                                       {"poison", blocks_overwritten}};
  });
  m.def("sleep", [] {
    HOLD_LOCK;
    enqueue(current(current_index), [] {});
  });
}
