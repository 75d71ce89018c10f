#include "mpi/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>

#include "control/error.h"

namespace polyhvd::mpi {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kCreateTag = 0x7076;  // of groups that are made from a list of ranks
constexpr auto kNap = std::chrono::microseconds(200);
constexpr auto kTickInterval = std::chrono::milliseconds(20);

// Returns whether the call has returned before the deadline.
bool returns(const BlockingCall& call, Clock::time_point deadline, const Runtime::Tick& tick) {
  for (;;) {
    const auto remaining = std::max(deadline - Clock::now(), Clock::duration::zero());
    if (call.wait_for(std::min<Clock::duration>(remaining, kTickInterval))) return true;
    if (Clock::now() >= deadline) return false;
    tick();
  }
}

// Waits for a request of init(). Whoever gives up leaves the request to MPI.
void await_request(Library& library, Handle& request, Clock::time_point deadline,
                   const Runtime::Tick& tick, const std::string& late) {
  auto next_tick = Clock::now() + kTickInterval;
  while (!library.test(request)) {
    const auto now = Clock::now();
    if (now >= deadline) throw Failure(ErrorCode::kPeerLost, late);
    if (now >= next_tick) {
      tick();
      next_tick = now + kTickInterval;
    }
    std::this_thread::sleep_for(kNap);
  }
}

Clock::time_point after(std::chrono::duration<double> timeout) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

}  // namespace

Runtime::Runtime(std::span<const std::string> names, ThreadLevel wanted)
    : library_(open_library(names)), wanted_(wanted) {
  if (library_->finalized()) {
    throw Failure(ErrorCode::kInvalidArgument,
                  which() +
                      " was finalized in this process, and cannot be initialized again; call "
                      "init() before MPI_Finalize, or let polyhvd finalize MPI");
  }
}

bool Runtime::initialize(std::chrono::duration<double> timeout, const Tick& tick) {
  if (!initializing_ && !library_->initialized()) {
    initializing_ = blocking_.begin(
        "MPI_Init_thread", [library = library_, wanted = wanted_] { library->initialize(wanted); });
  }
  if (initializing_) {
    if (!returns(*initializing_, after(timeout), tick)) return false;
    initializing_->check();
    ours_ = true;
  }
  threads_ = library_->thread_level();
  if (threads_ < ThreadLevel::kSerialized) {
    throw Failure(ErrorCode::kInvalidArgument,
                  which() + " was initialized by " + (ours_ ? "polyhvd" : "other code") + " with " +
                      std::string(name_of(threads_)) +
                      ", but polyhvd also calls it from another thread: request "
                      "MPI_THREAD_MULTIPLE or MPI_THREAD_SERIALIZED where MPI is initialized "
                      "(mpi4py: mpi4py.rc.thread_level), or use an MPI library that supports it");
  }
  return true;
}

Runtime::Making Runtime::begin_making(std::string name, std::function<Handle(Library&)> make) {
  const auto made = std::make_shared<Handle>();
  auto call = blocking_.begin(std::move(name), [library = library_, make = std::move(make), made] {
    *made = make(*library);
    library->return_errors(*made);
  });
  return {std::move(call), made};
}

Runtime::Making Runtime::make_group(Handle communicator, std::span<const int> members, int tag) {
  return begin_making(
      "MPI_Comm_create_group",
      [communicator, tag, members = std::vector(members.begin(), members.end())](Library& library) {
        return library.create_group(communicator, members, tag);
      });
}

Runtime::Making Runtime::split_by_host(Handle communicator) {
  return begin_making("MPI_Comm_split_type", [communicator](Library& library) {
    return library.split_by_host(communicator);
  });
}

Handle Runtime::await(const Making& making, std::chrono::duration<double> timeout, const Tick& tick,
                      const std::string& late) {
  try {
    if (!returns(*making.call, after(timeout), tick)) throw Failure(ErrorCode::kPeerLost, late);
  } catch (...) {
    give_up();
    throw;
  }
  making.call->check();
  return *making.made;
}

std::shared_ptr<JobCommunicator> Runtime::meet(std::optional<std::intptr_t> communicator,
                                               std::span<const int> ranks,
                                               std::chrono::duration<double> timeout,
                                               const Tick& tick) {
  Handle base = communicator ? library_->handle_of(*communicator) : library_->world();
  if (library_->joins_two_groups(base)) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "init(comm=...): an intercommunicator joins two groups; pass an "
                  "intracommunicator, such as its Merge()");
  }
  const int rank = library_->rank(base);
  const int size = library_->size(base);
  if (!ranks.empty()) {
    if (std::ranges::count(ranks, rank) == 0 || std::ranges::max(ranks) >= size) {
      throw Failure(ErrorCode::kInvalidArgument,
                    "init(comm=[...]): this is rank " + std::to_string(rank) + " of " +
                        std::to_string(size) +
                        "; each rank of the list must call it, with ranks that exist");
    }
    const Handle members = await(make_group(base, ranks, kCreateTag), timeout, tick,
                                 "rank " + std::to_string(rank) + " waited " +
                                     std::to_string(std::lround(timeout.count())) +
                                     " s for all ranks of the list to call init(comm=[...]); "
                                     "POLYHVD_START_TIMEOUT sets the limit");
    return std::make_shared<JobCommunicator>(shared_from_this(), members, timeout);
  }
  // Not to be on the stack when a wait was given up: MPI still writes to them.
  struct Duplicate {
    Handle communicator;
    Handle request;
  };
  auto duplicate = std::make_unique<Duplicate>();
  library_->start_duplicate(base, duplicate->communicator, duplicate->request);
  try {
    await_request(
        *library_, duplicate->request, after(timeout), tick,
        "rank " + std::to_string(rank) + " waited " + std::to_string(std::lround(timeout.count())) +
            " s for all " + std::to_string(size) +
            " ranks of the communicator to call init(); POLYHVD_START_TIMEOUT sets the limit");
  } catch (...) {
    give_up();
    (void)duplicate.release();
    throw;
  }
  library_->return_errors(duplicate->communicator);
  return std::make_shared<JobCommunicator>(shared_from_this(), duplicate->communicator, timeout);
}

void Runtime::give_up() noexcept {
  if (given_up_.exchange(true)) return;
  on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        _exit(status);
      },
      nullptr);
}

void Runtime::finish(const Tick& tick) {
  if (!ours_ || !usable() || !library_->initialized()) return;
  const auto call = blocking_.begin("MPI_Finalize", [library = library_] { library->finalize(); });
  returns(*call, Clock::time_point::max(), tick);
  call->check();
}

JobCommunicator::JobCommunicator(std::shared_ptr<Runtime> runtime, Handle communicator,
                                 std::chrono::duration<double> timeout)
    : runtime_(std::move(runtime)),
      communicator_(communicator),
      timeout_(timeout),
      rank_(runtime_->library().rank(communicator)),
      size_(runtime_->library().size(communicator)) {}

JobCommunicator::~JobCommunicator() {
  if (runtime_->usable()) library().free_communicator(communicator_);
}

std::vector<int> JobCommunicator::hosts(const Runtime::Tick& tick) {
  const Handle local =
      runtime_->await(runtime_->split_by_host(communicator_), timeout_, tick, late());
  // The split keeps the order of ranks.
  JobCommunicator here(runtime_, local, timeout_);
  const std::string first = here.gather(std::to_string(rank_), tick).front();
  std::vector<int> hosts;
  for (const std::string& text : gather(first, tick)) hosts.push_back(std::stoi(text));
  return hosts;
}

std::string JobCommunicator::late() const {
  return "rank " + std::to_string(rank_) + " waited " +
         std::to_string(std::lround(timeout_.count())) +
         " s for other ranks in init(); POLYHVD_START_TIMEOUT sets the limit";
}

std::vector<std::string> JobCommunicator::gather(const std::string& mine,
                                                 const Runtime::Tick& tick) {
  // On the heap, and left there when the wait is given up: MPI still writes to it.
  struct Transfer {
    std::string mine;
    int own = 0;
    std::vector<int> sizes, counts, offsets;
    std::string all;
    Handle request;
  };
  auto transfer = std::make_unique<Transfer>();
  Transfer& t = *transfer;
  const auto n = static_cast<std::size_t>(size_);
  t.mine = mine;
  t.own = static_cast<int>(mine.size());
  t.sizes.resize(n);
  t.counts.assign(n, sizeof(int));
  t.offsets.resize(n);
  for (std::size_t r = 0; r < n; ++r) t.offsets[r] = static_cast<int>(r * sizeof(int));
  const auto deadline = after(timeout_);
  try {
    library().start_allgather(&t.own, sizeof(int), t.sizes.data(), t.counts.data(),
                              t.offsets.data(), communicator_, t.request);
    await_request(library(), t.request, deadline, tick, late());
    std::int64_t total = 0;
    for (std::size_t r = 0; r < n; ++r) {
      t.offsets[r] = static_cast<int>(total);
      total += t.sizes[r];
      if (t.sizes[r] < 0 || total > std::numeric_limits<int>::max()) {
        throw Failure(ErrorCode::kInternal, "the messages of the ranks in init() are too long");
      }
    }
    t.all.resize(static_cast<std::size_t>(total));
    library().start_allgather(t.mine.data(), t.own, t.all.data(), t.sizes.data(), t.offsets.data(),
                              communicator_, t.request);
    await_request(library(), t.request, deadline, tick, late());
  } catch (...) {
    runtime_->give_up();
    (void)transfer.release();
    throw;
  }
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < n; ++r) {
    texts.push_back(
        t.all.substr(static_cast<std::size_t>(t.offsets[r]), static_cast<std::size_t>(t.sizes[r])));
  }
  return texts;
}

}  // namespace polyhvd::mpi
