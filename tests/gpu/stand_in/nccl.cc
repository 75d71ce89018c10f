// A test double of NCCL (libnccl.so.2) for machines without a GPU: the symbols that polyhvd
// uses, with the ABI of nccl.h 2.18 and later. Whatever NCCL would answer with a hang or with
// wrong numbers ends the process here, with the reason.
//
// What a call begins is a task on the caller's stream of the stand-in of CUDA, and moves bytes
// over Unix sockets; see links.h. As with a communicator that does not block, calls return
// while the task has yet to be given to the stream, and ncclCommGetAsyncError says when it was.
//
// POLYHVD_STAND_IN_NCCL_VERSION  what ncclGetVersion says (22809)
// POLYHVD_STAND_IN_NCCL_FAULT    KIND:RANK:N, at the N-th launch of that rank of a communicator:
//   error   an asynchronous error; hang  a task that only ncclCommAbort ends;
//   launch  the call itself fails; and at any N: init  that never ends; init-error
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "links.h"
#include "reduce.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace stand_in {
namespace {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
enum class Kind : int { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };

struct UniqueId {
  char text[128];
};
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

struct Call {
  Kind kind;
  const void* in;
  void* out;
  std::size_t count;
  int type;
  int op;
  int root;  // or the peer
  double factor = 1;
};

// What ranks have to agree on, as it travels.
struct Header {
  int kind, type, op, root;
  std::size_t count;
  std::uint64_t number;
  bool operator==(const Header&) const = default;
};

struct Fault {
  std::string kind;
  int rank = -1;
  long at = 0;
};

Fault fault() {
  const char* text = std::getenv("POLYHVD_STAND_IN_NCCL_FAULT");
  char kind[32] = "";
  Fault f;
  if (text != nullptr && std::sscanf(text, "%31[^:]:%d:%ld", kind, &f.rank, &f.at) < 2) {
    misuse("POLYHVD_STAND_IN_NCCL_FAULT", "it is KIND:RANK:N");
  }
  f.kind = kind;
  return f;
}

}  // namespace

// A communicator is never freed, so that a use of it after its end is found out.
struct Comm {
  int rank = 0, size = 0;
  Links links;
  std::mutex mutex;
  std::condition_variable changed;
  // All below are guarded by mutex.
  int state = kInProgress;  // what ncclCommGetAsyncError says
  std::string words = "no error";
  bool launching = false, finalized = false, dead = false;
  int running = 0;  // tasks that have begun
  int waiting = 0;  // tasks that streams have yet to begin
  int registered = 0;
  long launches = 0;
  std::uint64_t number = 0;  // of collectives, in step on all ranks; the stream's
  void* stream = nullptr;
  void* context = nullptr;        // of the device that was current when it was made
  std::map<int, double> factors;  // of operations that were made
  int next_op = 5;
};

namespace {

using Lock = std::unique_lock<std::mutex>;

void* in_cuda(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) misuse(name, "the stand-in of CUDA is not in this process");
  return found;
}

// The bytes behind memory of a device.
std::byte* view(const void* data, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  static const auto open =
      reinterpret_cast<void* (*)(const void*, std::size_t)>(in_cuda("polyhvd_stand_in_open"));
  return static_cast<std::byte*>(open(data, bytes));
}

void check_memory(const char* call, const void* data, std::size_t bytes) {
  static const auto is_device = reinterpret_cast<int (*)(const void*, std::size_t)>(
      in_cuda("polyhvd_stand_in_is_device_memory"));
  if (bytes > 0 && is_device(data, bytes) == 0) misuse(call, "a buffer is not of a device");
}

Comm& alive(const char* call, Comm* comm) {
  if (comm == nullptr) misuse(call, "there is no communicator");
  const Lock lock(comm->mutex);
  if (comm->dead) misuse(call, "the communicator has ended");
  return *comm;
}

void wait_for_abort(Comm& c) {
  Lock lock(c.mutex);
  c.changed.wait(lock, [&] { return c.links.aborted(); });
}

// What a rank contributes to a collective, scaled as its operation says.
std::vector<std::byte> term_of(const Comm& c, const Call& call) {
  std::size_t elements = call.count;
  if (call.kind == Kind::kReduceScatter) elements *= static_cast<std::size_t>(c.size);
  if (call.kind == Kind::kBroadcast && call.root != c.rank) return {};
  const std::size_t bytes = elements * size_of(call.type);
  const std::byte* data = view(call.in, bytes);
  std::vector<std::byte> term(data, data + bytes);
  if (call.op >= 5) scale(call.type, term, call.factor);
  return term;
}

std::size_t term_bytes(const Comm& c, const Call& call, int rank) {
  const std::size_t bytes = call.count * size_of(call.type);
  if (call.kind == Kind::kReduceScatter) return bytes * static_cast<std::size_t>(c.size);
  return call.kind == Kind::kBroadcast && rank != call.root ? 0 : bytes;
}

// On the first rank: everybody's terms to everybody's result.
std::vector<std::vector<std::byte>> results_of(const Comm& c, const Call& call,
                                               std::vector<std::vector<std::byte>> terms) {
  const auto n = static_cast<std::size_t>(c.size);
  std::vector<std::byte> all;
  if (call.kind == Kind::kAllGather) {
    for (const auto& term : terms) all.insert(all.end(), term.begin(), term.end());
  } else if (call.kind == Kind::kBroadcast) {
    all = terms[static_cast<std::size_t>(call.root)];
  } else {
    all = reduce(call.type, call.op >= 5 ? 0 : call.op, terms);
  }
  std::vector<std::vector<std::byte>> results(n, all);
  if (call.kind != Kind::kReduceScatter) return results;
  const auto part = static_cast<std::ptrdiff_t>(all.size() / n);
  for (std::size_t r = 0; r < n; ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r) * part;
    results[r].assign(begin, begin + part);
  }
  return results;
}

bool run_collective(Comm& c, const Call& call) {
  const Header mine{static_cast<int>(call.kind),
                    call.type,
                    call.op >= 5 ? 5 : call.op,
                    call.root,
                    call.count,
                    ++c.number};
  std::vector<std::byte> term = term_of(c, call);
  std::vector<std::byte> result;
  if (c.rank == 0) {
    std::vector<std::vector<std::byte>> terms{std::move(term)};
    for (int r = 1; r < c.size; ++r) {
      Header theirs;
      if (!c.links.receive(r, &theirs, sizeof theirs)) return false;
      if (!(theirs == mine))
        misuse("a collective", "ranks call different ones, or in another order");
      terms.emplace_back(term_bytes(c, call, r));
      if (!c.links.receive(r, terms.back().data(), terms.back().size())) return false;
    }
    auto results = results_of(c, call, std::move(terms));
    for (int r = 1; r < c.size; ++r) {
      const auto& part = results[static_cast<std::size_t>(r)];
      if (!c.links.send(r, part.data(), part.size())) return false;
    }
    result = std::move(results[0]);
  } else {
    std::size_t bytes = call.count * size_of(call.type);
    if (call.kind == Kind::kAllGather) bytes *= static_cast<std::size_t>(c.size);
    result.resize(bytes);
    if (!c.links.send(0, &mine, sizeof mine) || !c.links.send(0, term.data(), term.size()) ||
        !c.links.receive(0, result.data(), result.size())) {
      return false;
    }
  }
  if (!result.empty()) std::memcpy(view(call.out, result.size()), result.data(), result.size());
  return true;
}

// All sends of a group go while its receives come.
bool run_exchange(Comm& c, const std::vector<Call>& calls) {
  bool sent = true, received = true;
  std::vector<std::vector<std::byte>> own;
  for (const Call& call : calls) {
    if (call.kind != Kind::kSend || call.root != c.rank) continue;
    const std::byte* data = view(call.in, call.count);
    own.emplace_back(data, data + call.count);
  }
  std::thread sender([&] {
    for (const Call& call : calls) {
      if (call.kind != Kind::kSend || call.root == c.rank) continue;
      const std::uint64_t bytes = call.count;
      sent = sent && c.links.send(call.root, &bytes, sizeof bytes) &&
             c.links.send(call.root, view(call.in, bytes), bytes);
    }
  });
  std::size_t next = 0;
  for (const Call& call : calls) {
    if (call.kind != Kind::kRecv || !received) continue;
    if (call.root == c.rank) {
      if (next >= own.size() || own[next].size() != call.count) misuse("ncclRecv", "of itself");
      std::memcpy(view(call.out, call.count), own[next++].data(), call.count);
      continue;
    }
    std::uint64_t bytes = 0;
    received = c.links.receive(call.root, &bytes, sizeof bytes);
    if (received && bytes != call.count)
      misuse("ncclRecv", "the peer sends another number of bytes");
    received = received && c.links.receive(call.root, view(call.out, bytes), bytes);
  }
  sender.join();
  return sent && received;
}

struct Task {
  Comm* comm;
  std::vector<Call> calls;
  std::string fault;
};

bool run_calls(Comm& c, const std::vector<Call>& calls) {
  std::vector<Call> pairs;
  for (const Call& call : calls) {
    if (call.kind == Kind::kSend || call.kind == Kind::kRecv) {
      pairs.push_back(call);
    } else if (!run_collective(c, call)) {
      return false;
    }
  }
  return pairs.empty() || run_exchange(c, pairs);
}

void run_task(void* context) {
  const std::unique_ptr<Task> task(static_cast<Task*>(context));
  Comm& c = *task->comm;
  {
    const Lock lock(c.mutex);
    --c.waiting;
    if (c.links.aborted()) return;
    ++c.running;
  }
  const bool done = task->fault.empty() && run_calls(c, task->calls);
  if (!done) {
    {
      const Lock lock(c.mutex);
      if (task->fault != "hang") {
        c.state = kRemoteError;
        c.words = "a peer has gone (stand-in)";
      }
    }
    wait_for_abort(c);  // as a kernel that spins
  }
  const Lock lock(c.mutex);
  --c.running;
  c.changed.notify_all();
}

int launch(const char* name, Comm& c, std::vector<Call> calls, void* stream) {
  static const auto enqueue =
      reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(in_cuda("polyhvd_stand_in_enqueue"));
  const Fault injected = fault();
  Lock lock(c.mutex);
  if (c.finalized) misuse(name, "the communicator was finalized");
  if (c.state == kInProgress || c.launching) misuse(name, "the call before is still in progress");
  if (c.stream != nullptr && c.stream != stream) misuse(name, "a second stream");
  c.stream = stream;
  const bool hit = injected.rank == c.rank && injected.at == ++c.launches;
  if (hit && injected.kind == "launch") {
    c.words = "the launch failed (stand-in)";
    return kSystemError;
  }
  if (c.state != kSuccess) return c.state;
  c.state = kInProgress;
  c.launching = true;
  ++c.waiting;
  auto* task = new Task{&c, std::move(calls), hit ? injected.kind : ""};
  std::thread([&c, task, stream] {
    static thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    reinterpret_cast<int (*)(void*)>(in_cuda("cuCtxPushCurrent_v2"))(c.context);
    enqueue(stream, run_task, task);
    reinterpret_cast<int (*)(void**)>(in_cuda("cuCtxPopCurrent_v2"))(nullptr);
    const Lock done(c.mutex);
    c.launching = false;
    if (c.state == kInProgress) c.state = kSuccess;
    c.changed.notify_all();
  }).detach();
  return kInProgress;
}

struct Group {
  int depth = 0;
  std::vector<std::pair<Comm*, void*>> order;
  std::map<Comm*, std::vector<Call>> calls;
};
thread_local Group t_group;

int add(const char* name, Comm* comm, Call call, void* stream) {
  Comm& c = alive(name, comm);
  const std::size_t bytes = call.count * size_of(call.type);
  const auto n = static_cast<std::size_t>(c.size);
  const bool reads =
      call.kind != Kind::kRecv && (call.kind != Kind::kBroadcast || call.root == c.rank);
  if (reads) check_memory(name, call.in, call.kind == Kind::kReduceScatter ? bytes * n : bytes);
  if (call.kind != Kind::kSend) {
    check_memory(name, call.out, call.kind == Kind::kAllGather ? bytes * n : bytes);
  }
  if (call.root < 0 || call.root >= c.size) return kInvalidArgument;
  {
    const Lock lock(c.mutex);
    if (call.op >= 5) {
      if (!c.factors.contains(call.op)) misuse(name, "there is no such operation");
      call.factor = c.factors.at(call.op);
    }
    if (c.state == kInProgress) misuse(name, "the call before is still in progress");
  }
  const bool pairwise = call.kind == Kind::kSend || call.kind == Kind::kRecv;
  if (t_group.depth == 0) {
    if (pairwise) misuse(name, "outside of a group, where ranks would wait for each other");
    return launch(name, c, {call}, stream);
  }
  if (!t_group.calls.contains(comm)) t_group.order.emplace_back(comm, stream);
  t_group.calls[comm].push_back(call);
  return kSuccess;
}

void begin(Comm& c, const std::string& address) {
  const Fault injected = fault();
  const bool mine = injected.rank == c.rank;
  const bool met =
      !(mine && injected.kind.starts_with("init")) && c.links.meet(address, c.rank, c.size);
  if (!met && !(mine && injected.kind == "init-error")) wait_for_abort(c);
  const Lock lock(c.mutex);
  c.state = met ? kSuccess : kSystemError;
  if (!met) c.words = "no way to meet (stand-in)";
  c.launching = false;
  c.changed.notify_all();
}

}  // namespace

// Library ---------------------------------------------------------------------------------

EXPORTED int ncclGetVersion(int* version) {
  const char* text = std::getenv("POLYHVD_STAND_IN_NCCL_VERSION");
  *version = text != nullptr ? std::atoi(text) : 22809;
  return kSuccess;
}

EXPORTED const char* ncclGetErrorString(int code) {
  constexpr std::array<const char*, 8> kWords{"no error",
                                              "unhandled cuda error",
                                              "unhandled system error",
                                              "internal error",
                                              "invalid argument",
                                              "invalid usage",
                                              "remote process exited or there was a network error",
                                              "NCCL operation in progress"};
  return kWords.at(static_cast<std::size_t>(code));
}

EXPORTED const char* ncclGetLastError(Comm* comm) {
  return comm == nullptr ? "" : comm->words.c_str();
}

EXPORTED int ncclMemAlloc(void** data, std::size_t bytes) {
  using Allocate = int (*)(void**, std::size_t);
  return reinterpret_cast<Allocate>(in_cuda("cuMemAlloc_v2"))(data, bytes) == 0 ? kSuccess
                                                                                : kSystemError;
}

EXPORTED int ncclMemFree(void* data) {
  return reinterpret_cast<int (*)(void*)>(in_cuda("cuMemFree_v2"))(data) == 0 ? kSuccess
                                                                              : kSystemError;
}

// Communicators ---------------------------------------------------------------------------

// Lives as long as the process, so that use after its end is reported; where a leak checker sees
// it.
static Comm* made() {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<Comm>>;
  const Lock lock(mutex);
  return all.emplace_back(std::make_unique<Comm>()).get();
}

EXPORTED int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const std::string address = Links::listen_for_first();
  std::memcpy(id->text, address.data(), address.size());
  return kSuccess;
}

EXPORTED int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size < sizeof(Config)) return kInvalidArgument;
  if (config->blocking != 0) misuse(__func__, "polyhvd never blocks");
  if (rank < 0 || rank >= size) return kInvalidArgument;
  void* context = nullptr;
  reinterpret_cast<int (*)(void**)>(in_cuda("cuCtxGetCurrent"))(&context);
  if (context == nullptr) misuse(__func__, "no context is current on this thread");
  Comm& c = *(*comm = made());
  c.rank = rank;
  c.size = size;
  c.context = context;
  c.launching = true;
  std::thread([&c, address = std::string(id.text)] { begin(c, address); }).detach();
  return kInProgress;
}

EXPORTED int ncclCommGetAsyncError(Comm* comm, int* state) {
  Comm& c = alive(__func__, comm);
  const Lock lock(c.mutex);
  *state = c.state;
  return kSuccess;
}

EXPORTED int ncclCommFinalize(Comm* comm) {
  Comm& c = alive(__func__, comm);
  const Lock lock(c.mutex);
  if (c.state != kSuccess) misuse(__func__, "the communicator is not in good order");
  if (c.finalized) misuse(__func__, "called twice");
  c.finalized = true;
  return kInProgress;  // that it has ended is said at once
}

EXPORTED int ncclCommDestroy(Comm* comm) {
  Comm& c = alive(__func__, comm);
  Lock lock(c.mutex);
  if (c.state != kSuccess || c.launching) misuse(__func__, "the communicator is not in good order");
  if (c.running + c.waiting > 0) misuse(__func__, "its work has not ended");
  if (c.registered > 0) misuse(__func__, "memory is still registered");
  c.dead = true;
  lock.unlock();
  c.links.close();
  return kSuccess;
}

EXPORTED int ncclCommAbort(Comm* comm) {
  Comm& c = alive(__func__, comm);
  Lock lock(c.mutex);
  c.links.abort();
  c.changed.notify_all();
  c.changed.wait(lock, [&] { return c.running == 0 && !c.launching; });
  c.dead = true;
  lock.unlock();
  c.links.close();
  return kSuccess;
}

EXPORTED int ncclCommRegister(Comm* comm, void* data, std::size_t bytes, void** handle) {
  Comm& c = alive(__func__, comm);
  check_memory(__func__, data, bytes);
  const Lock lock(c.mutex);
  ++c.registered;
  *handle = data;
  return kSuccess;
}

EXPORTED int ncclCommDeregister(Comm* comm, void*) {
  Comm& c = alive(__func__, comm);
  const Lock lock(c.mutex);
  if (--c.registered < 0) misuse(__func__, "of what was not registered");
  return kSuccess;
}

// The factor is read at once: ncclScalarHostImmediate is 1.
EXPORTED int ncclRedOpCreatePreMulSum(int* op, void* factor, int type, int residence, Comm* comm) {
  Comm& c = alive(__func__, comm);
  if (residence != 1) misuse(__func__, "the factor is given by the host");
  const Lock lock(c.mutex);
  if (c.state == kInProgress) misuse(__func__, "the call before is still in progress");
  *op = c.next_op++;
  c.factors[*op] = number_at(type, factor);
  return kSuccess;
}

EXPORTED int ncclRedOpDestroy(int op, Comm* comm) {
  Comm& c = alive(__func__, comm);
  const Lock lock(c.mutex);
  if (c.factors.erase(op) == 0) misuse(__func__, "there is no such operation");
  return kSuccess;
}

// Moving bytes ----------------------------------------------------------------------------

EXPORTED int ncclGroupStart() {
  ++t_group.depth;
  return kSuccess;
}

EXPORTED int ncclGroupEnd() {
  if (t_group.depth == 0) misuse(__func__, "no group was started");
  if (--t_group.depth > 0) return kSuccess;
  int worst = kSuccess;
  for (const auto& [comm, stream] : t_group.order) {
    const int result = launch(__func__, *comm, std::move(t_group.calls.at(comm)), stream);
    if (worst == kSuccess || worst == kInProgress) worst = result;
  }
  t_group.order.clear();
  t_group.calls.clear();
  return worst;
}

EXPORTED int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int op,
                           Comm* comm, void* stream) {
  return add(__func__, comm, {Kind::kAllReduce, in, out, count, type, op, 0}, stream);
}

EXPORTED int ncclReduceScatter(const void* in, void* out, std::size_t count, int type, int op,
                               Comm* comm, void* stream) {
  return add(__func__, comm, {Kind::kReduceScatter, in, out, count, type, op, 0}, stream);
}

EXPORTED int ncclAllGather(const void* in, void* out, std::size_t count, int type, Comm* comm,
                           void* stream) {
  return add(__func__, comm, {Kind::kAllGather, in, out, count, type, 0, 0}, stream);
}

EXPORTED int ncclBroadcast(const void* in, void* out, std::size_t count, int type, int root,
                           Comm* comm, void* stream) {
  return add(__func__, comm, {Kind::kBroadcast, in, out, count, type, 0, root}, stream);
}

EXPORTED int ncclSend(const void* in, std::size_t count, int type, int peer, Comm* comm,
                      void* stream) {
  return add(__func__, comm, {Kind::kSend, in, nullptr, count * size_of(type), 1, 0, peer}, stream);
}

EXPORTED int ncclRecv(void* out, std::size_t count, int type, int peer, Comm* comm, void* stream) {
  return add(__func__, comm, {Kind::kRecv, nullptr, out, count * size_of(type), 1, 0, peer},
             stream);
}

}  // namespace stand_in
