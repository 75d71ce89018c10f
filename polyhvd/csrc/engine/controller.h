// The control plane of one rank: reports what it is ready for up the tree, and
// turns decisions that come down into work. Driver only; never blocks.
//
// Within a host every rank talks to the leader, its first rank; leaders talk to
// each other along a tree. World rank 0 is the root and holds the Coordinator.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator.h"
#include "control/inquiry.h"
#include "control/relay.h"
#include "control/tuning.h"
#include "engine/channel.h"
#include "engine/op_queue.h"

namespace polyhvd {

// Agreed operations that run as one, in the total order; or, with an error, one
// that all agreed to refuse; or, without operations, a tuning that holds from here on.
struct Work {
  ProcessSetId process_set = kWorld;
  std::vector<OperationPtr> operations;
  std::optional<Error> error;
  std::optional<Tuning> tuning;
};

// A child in the control tree and the world ranks that it speaks for.
struct Child {
  std::unique_ptr<Channel> channel;
  std::vector<int> ranks;
};

class Controller {
 public:
  // `parent` is null on the root.
  Controller(int rank, const ProcessSets& sets, OpQueue& queue, CoordinatorOptions options,
             std::unique_ptr<Channel> parent, std::vector<Child> children);

  // Moves everything that can move now; true when something did. Throws Failure
  // when a connection breaks or the job was aborted elsewhere.
  bool progress();

  // Why the parent has left in good order, once it has. Everything that was agreed
  // before is in the work; nothing comes after.
  const std::optional<Departure>& farewell() const noexcept { return farewell_; }

  bool has_work() const noexcept { return !work_.empty(); }
  Work take_work();

  // Before this rank sleeps over an answer.
  void nudge() noexcept;

  // This rank leaves in good order, with nothing announced; `words`: see Departure. Best effort.
  void depart(const std::string& words) noexcept;
  // Lets the neighbours on other hosts notice what was lost on the way to them.
  void beat(std::chrono::steady_clock::time_point now);

  // After a failure: why the job has ended, if a neighbour has sent that by now. What
  // else has come is dropped.
  std::optional<Error> take_abort() noexcept;
  // Sends it to all neighbours in the tree. Best effort.
  void post_abort(const Error& error) noexcept;

  bool is_root() const noexcept { return coordinator_.has_value(); }
  // On the root: from the next decision on, on every rank.
  void tune(const Tuning& tuning);
  // On the root: asks everybody, this rank included.
  void ask(const Inquiry& inquiry);
  // The inquiry that came last, once.
  std::optional<Inquiry> take_inquiry() { return std::exchange(inquiry_, std::nullopt); }
  // On its way to the root, also from this rank to itself.
  void answer(const Answer& answer);
  // On the root: what came since the last call.
  std::vector<Answer> take_answers() { return std::exchange(answers_, {}); }

  // On the root: what some ranks wait for and others have not submitted.
  std::vector<Stalled> stalled(std::chrono::duration<double> at_least) const;

 private:
  struct Branch {
    std::unique_ptr<Channel> channel;
    Subtree subtree;
  };

  // Ranks that are at and below this node.
  std::vector<int> subtree() const;
  bool announce();
  bool read_children();
  bool read_parent();
  void report_up();
  bool decide();
  void accept(const Report& report, const Subtree& from);
  void apply(const Decision& decision);
  void apply_batch(const Batch& batch);
  OperationPtr operation_for(const Agreement& agreement, Turn turn);
  void refuse(const Refusal& refusal);
  void change_sets(const Agreement& agreement, Operation& operation);
  void pass_on_answer();
  void pass_on_tuning();
  void pass_on_inquiry();
  void send_to_children(std::string_view payload);
  void flush();

  const int rank_;
  const ProcessSets& sets_;
  const Subtree self_;  // just this rank
  OpQueue& queue_;
  std::unique_ptr<Channel> parent_;
  std::vector<Branch> children_;
  std::optional<Coordinator> coordinator_;  // on the root
  std::optional<Relay> relay_;              // on inner nodes that are not the root
  std::deque<Work> work_;
  std::optional<Departure> farewell_;  // the parent has left
  Departure cause_;            // of a refusal: whose program has failed; without words: none
  std::uint64_t batches_ = 0;  // of all process sets: the number of the last one
  std::optional<Inquiry> inquiry_;
  std::vector<Answer> answers_;  // on the root
  std::string payload_;          // scratch
  Report report_;                // scratch
};

}  // namespace polyhvd
