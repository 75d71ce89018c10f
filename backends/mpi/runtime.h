// MPI in this process, and the ranks of a job as MPI knows them. What is called here
// belongs to init() and to the end of the process; the data path is in mpi_backend.h.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mpi/blocking_calls.h"
#include "mpi/library.h"

namespace polyhvd::mpi {

class JobCommunicator;

// One per process: MPI can be initialised once in its life.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  // Called now and then while something is waited for; throws to end the wait.
  using Tick = std::function<void()>;

  // Opens the first of the libraries that is there. Throws Failure(kInvalidArgument) when there
  // is none, and when MPI has been finalised.
  Runtime(std::span<const std::string> names, ThreadLevel wanted);

  Library& library() const noexcept { return *library_; }
  ThreadLevel threads() const noexcept { return threads_; }

  // Initialises MPI, unless that was done; false when it has not begun after `timeout`, as
  // other processes of the launcher's have not called it. Then it may be called again, and
  // waits on. Throws Failure(kInvalidArgument) when MPI lets only one thread call it, and what
  // `tick` throws.
  bool initialize(std::chrono::duration<double> timeout, const Tick& tick);
  // The ranks of a communicator, by default of MPI's world; or of those of its ranks that are
  // given, this one among them. All of them call it, within `timeout`.
  std::shared_ptr<JobCommunicator> meet(std::optional<std::intptr_t> communicator,
                                        std::span<const int> ranks,
                                        std::chrono::duration<double> timeout, const Tick& tick);

  // Begins to make a communicator of ranks of another one. All of them call it, whereas MPI may
  // never say that one does not come: a caller that stops waiting gives up.
  struct Making {
    std::shared_ptr<BlockingCall> call;
    std::shared_ptr<const Handle> made;  // when the call has finished
  };
  Making make_group(Handle communicator, std::span<const int> members, int tag);
  Making split_by_host(Handle communicator);
  // Returns what was made; otherwise gives up, and throws what `tick` throws, or
  // Failure(kPeerLost, late).
  Handle await(const Making& making, std::chrono::duration<double> timeout, const Tick& tick,
               const std::string& late);

  // From now on MPI may wait for ranks that do not come: nothing is freed or finalised, and the
  // process ends without the destructors of libraries, of which MPI's may wait, too.
  void give_up() noexcept;
  bool usable() const noexcept { return !given_up_.load() && !library_->finalized(); }
  // At the end of the process: finalises MPI if it was initialised here and no rank has failed.
  // Other ranks may come to that much later; throws what `tick` throws.
  void finish(const Tick& tick);

 private:
  Making begin_making(std::string name, std::function<Handle(Library&)> make);
  std::string which() const { return library_->version() + " (" + library_->path() + ")"; }

  std::shared_ptr<Library> library_;
  BlockingCalls blocking_;
  const ThreadLevel wanted_;
  std::shared_ptr<BlockingCall> initializing_;  // null unless it was begun here
  ThreadLevel threads_ = ThreadLevel::kSingle;
  bool ours_ = false;
  std::atomic<bool> given_up_{false};
};

// A communicator of our own over all ranks of a job, in their order.
class JobCommunicator {
 public:
  // Takes a communicator whose errors come back.
  JobCommunicator(std::shared_ptr<Runtime> runtime, Handle communicator,
                  std::chrono::duration<double> timeout);
  ~JobCommunicator();
  JobCommunicator(const JobCommunicator&) = delete;
  JobCommunicator& operator=(const JobCommunicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  Runtime& runtime() const noexcept { return *runtime_; }
  Library& library() const noexcept { return runtime_->library(); }
  Handle communicator() const noexcept { return communicator_; }

  // For each rank the first rank that shares memory with it, according to MPI. On all ranks
  // together.
  std::vector<int> hosts(const Runtime::Tick& tick);
  // The texts of all ranks, in order. On all ranks together.
  std::vector<std::string> gather(const std::string& mine, const Runtime::Tick& tick);

 private:
  std::string late() const;

  std::shared_ptr<Runtime> runtime_;
  Handle communicator_;
  std::chrono::duration<double> timeout_;
  int rank_;
  int size_;
};

}  // namespace polyhvd::mpi
