#include "engine/controller.h"

#include <algorithm>
#include <new>
#include <thread>

#include "control/unhurried.h"
#include "control/wire.h"
#include "engine/stand_in.h"

namespace polyhvd {
namespace {

using Clock = std::chrono::steady_clock;

// How long a relay keeps a hit that waits for the rest of its subtree.
constexpr std::chrono::duration<double> kRelayPatience{2.0};
// Likewise a request of a name that is new: that the others are late costs more then,
// since every side goes up in full, but no time.
constexpr std::chrono::duration<double> kFirstRoundPatience{0.25};
// How long a leaving rank tries to get its last words out.
constexpr std::chrono::milliseconds kFarewellTime{200};

// The last words on a channel. Best effort: that end may be gone already.
void send_last(Channel& channel, const std::string& payload) noexcept {
  channel.post(payload);
  const auto deadline = Clock::now() + kFarewellTime;
  while (!channel.flush() && Clock::now() < deadline) std::this_thread::yield();
  channel.nudge();
}

}  // namespace

Controller::Controller(int rank, const ProcessSets& sets, OpQueue& queue,
                       CoordinatorOptions options, std::unique_ptr<Channel> parent,
                       std::vector<Child> children)
    : rank_(rank), sets_(sets), self_(sets, {rank}), queue_(queue), parent_(std::move(parent)) {
  for (Child& child : children) {
    children_.push_back({std::move(child.channel), Subtree(sets_, std::move(child.ranks))});
  }
  if (!parent_) {
    coordinator_.emplace(sets_, options);
  } else if (!children_.empty()) {
    relay_.emplace(sets_, subtree());
  }
}

std::vector<int> Controller::subtree() const {
  std::vector<int> ranks{rank_};
  for (const Branch& child : children_) {
    const auto below = child.subtree.ranks();
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  std::ranges::sort(ranks);
  return ranks;
}

bool Controller::progress() {
  bool moved = announce();
  moved |= read_children();
  moved |= coordinator_ ? decide() : (report_up(), false);
  moved |= read_parent();
  flush();
  return moved;
}

bool Controller::announce() {
  if (!queue_.has_news()) return false;
  report_.subtree_hits.clear();
  report_.subtree_turns.clear();
  report_.requests.clear();
  queue_.announce(report_);
  accept(report_, self_);
  return true;
}

// What this rank or a child reports goes to the coordinator, the relay or the
// parent, whichever stands here.
void Controller::accept(const Report& report, const Subtree& from) {
  if (report.empty()) return;
  if (coordinator_) {
    coordinator_->add(report, from, Clock::now());
  } else if (relay_) {
    relay_->add(report, from, queue_.cache(), Clock::now());
  } else {
    payload_.clear();
    encode(report, payload_);
    parent_->post(payload_);
  }
}

bool Controller::read_children() {
  bool moved = false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    bool departed = false;
    while (!departed && children_[i].channel->poll(payload_)) {
      moved = true;
      const MessageType type = type_of(payload_);
      if (type == MessageType::kAbort) throw Failure(decode_abort(payload_));
      if (type == MessageType::kAnswer) {
        pass_on_answer();
        continue;
      }
      const Report report = decode_report(payload_);
      accept(report, children_[i].subtree);
      departed =
          std::ranges::count(report.departures, children_[i].channel->peer(), &Departure::rank) > 0;
    }
    if (departed) children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  return moved;
}

bool Controller::decide() {
  if (!coordinator_->has_decision()) return false;
  const Decision decision = coordinator_->take_decision();
  if (!children_.empty()) {
    payload_.clear();
    encode(decision, payload_);
    send_to_children(payload_);
  }
  apply(decision);
  return true;
}

void Controller::report_up() {
  if (!relay_ || !parent_ || farewell_) return;
  const Report report = relay_->take_report(Clock::now(), kRelayPatience, kFirstRoundPatience);
  if (report.empty()) return;
  payload_.clear();
  encode(report, payload_);
  parent_->post(payload_);
}

bool Controller::read_parent() {
  bool moved = false;
  while (parent_ && !farewell_ && parent_->poll(payload_)) {
    moved = true;
    const MessageType type = type_of(payload_);
    if (type == MessageType::kAbort) throw Failure(decode_abort(payload_));
    if (type == MessageType::kFarewell) {
      send_to_children(payload_);
      farewell_ = decode_farewell(payload_);
      break;
    }
    if (type == MessageType::kInquiry) {
      pass_on_inquiry();
      continue;
    }
    if (type == MessageType::kTuning) {
      pass_on_tuning();
      continue;
    }
    send_to_children(payload_);
    apply(decode_decision(payload_));
  }
  return moved;
}

void Controller::send_to_children(std::string_view payload) {
  for (const Branch& child : children_) child.channel->post(payload);
}

void Controller::flush() {
  if (parent_ && !farewell_) parent_->flush();
  for (const Branch& child : children_) child.channel->flush();
}

void Controller::apply(const Decision& decision) {
  if (!decision.definitions.empty()) {
    queue_.change_cache([&](ResponseCache& cache) {
      for (const Definition& definition : decision.definitions) cache.define(definition);
    });
  }
  Report again;
  for (const Resend& resend : decision.resends) {
    if (resend.rank != rank_) continue;
    queue_.announce_in_full(resend.id, resend.turn, again);
    again.answers.push_back(resend);
  }
  for (const Refusal& refusal : decision.refusals) refuse(refusal);
  for (const Batch& batch : decision.batches) apply_batch(batch);
  if (!decision.evictions.empty()) {
    for (const CacheId id : decision.evictions) {
      if (relay_) relay_->withdraw(id);
    }
    queue_.change_cache([&](ResponseCache& cache) {
      for (const CacheId id : decision.evictions) cache.evict(id);
    });
  }
  accept(again, self_);
}

void Controller::refuse(const Refusal& refusal) {
  const TurnKey key{refusal.process_set, refusal.kind, refusal.turn};
  if (relay_ && refusal.error.code == ErrorCode::kPeerDeparted) relay_->doom(refusal.process_set);
  if (relay_ && key.turn != 0) relay_->end_turn(key);
  OperationPtr operation = queue_.find(refusal.process_set, refusal.name);
  // One that is agreed is an earlier one of that name, still being executed.
  if (operation && operation->announced && !operation->agreed) {
    operation->agreed = true;
    if (cause_.words.empty()) cause_ = refusal.cause;
    if (!is_unhurried(refusal.name)) queue_.waits().on_agreement(ticks_now());
    work_.push_back({refusal.process_set, {std::move(operation)}, refusal.error, {}});
  } else if (key.turn != 0 && queue_.has_joined()) {
    queue_.pass_over(key);
  }
}

void Controller::apply_batch(const Batch& batch) {
  ++batches_;
  const Ticks now = ticks_now();
  Work work;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const CacheId id = batch.ids[i];
    const Turn turn = batch.turn(i);
    const Agreement* agreement = queue_.cache().get(id);
    if (agreement == nullptr) {
      throw Failure(ErrorCode::kInternal, "a decision names operation " + std::to_string(id) +
                                              ", which was never defined");
    }
    work.process_set = agreement->process_set;
    if (relay_ && turn != 0) relay_->end_turn({agreement->process_set, agreement->kind, turn});
    if (!sets_.position(agreement->process_set, rank_)) continue;
    OperationPtr operation = operation_for(*agreement, turn);
    operation->agreed = true;
    ++agreement->runs.count;
    queue_.recorder().on_agreement(*operation, batches_, id, batch.ids.size(), now);
    if (!operation->stands_in && !is_unhurried(agreement->name)) queue_.waits().on_agreement(now);
    if (agreement->kind == OpKind::kAllgather) operation->rows = agreement->rows;
    change_sets(*agreement, *operation);
    work.operations.push_back(std::move(operation));
  }
  if (!work.operations.empty()) work_.push_back(std::move(work));
}

OperationPtr Controller::operation_for(const Agreement& agreement, Turn turn) {
  const ProcessSetId set = agreement.process_set;
  auto operation = turn == 0 ? queue_.find(set, agreement.name)
                             : queue_.find(set, TurnName(agreement.kind, turn).view());
  if (operation) {
    // One that is agreed is an earlier one of that name: this rank has joined since.
    if (operation->announced && !operation->agreed) return operation;
  }
  if (queue_.has_joined()) {
    operation = stand_in(agreement, *sets_.position(set, rank_));
    if (turn != 0) {
      operation->submission.name = TurnName(agreement.kind, turn).text();
      queue_.pass_over({set, agreement.kind, turn});
    }
    queue_.record(*operation);
    return operation;
  }
  throw Failure(ErrorCode::kInternal,
                "a decision names " + std::string(name_of(agreement.kind)) + " '" +
                    (turn == 0 ? agreement.name : TurnName(agreement.kind, turn).text()) +
                    "', which this rank has not asked for");
}

// What an agreement means for the control plane itself.
void Controller::change_sets(const Agreement& agreement, Operation& operation) {
  switch (agreement.kind) {
    case OpKind::kAddProcessSet: {
      std::vector<int> ranks;
      for (const Shape& rank : agreement.shapes) ranks.push_back(static_cast<int>(rank.at(0)));
      operation.number = queue_.add_process_set(std::move(ranks));
      break;
    }
    case OpKind::kRemoveProcessSet:
      queue_.remove_process_set(static_cast<ProcessSetId>(agreement.root));
      if (relay_) relay_->remove(static_cast<ProcessSetId>(agreement.root));
      break;
    case OpKind::kJoin:
      operation.number = agreement.root;
      if (relay_) relay_->end_join();
      break;
    default:
      break;
  }
}

Work Controller::take_work() {
  Work work = std::move(work_.front());
  work_.pop_front();
  return work;
}

void Controller::nudge() noexcept {
  if (parent_ && !farewell_) parent_->nudge();
}

void Controller::depart(const std::string& words) noexcept {
  try {
    const bool is_victim = words.empty() && !cause_.words.empty();
    payload_.clear();
    encode_farewell(is_victim ? cause_ : Departure{rank_, words}, payload_);
    const std::string farewell = payload_;
    for (const Branch& child : children_) send_last(*child.channel, farewell);
    if (parent_ && !farewell_) {
      Report report;
      for (const int rank : subtree()) {
        report.departures.push_back({rank, rank == rank_ ? words : std::string()});
      }
      payload_.clear();
      encode(report, payload_);
      send_last(*parent_, payload_);
    }
  } catch (const std::bad_alloc&) {
    // Nothing is sent then; the others see the connections close.
  }
}

void Controller::beat(Clock::time_point now) {
  if (parent_ && !farewell_) parent_->beat(now);
  for (const Branch& child : children_) child.channel->beat(now);
}

std::optional<Error> Controller::take_abort() noexcept {
  const auto abort_from = [this](Channel& channel) -> std::optional<Error> {
    try {
      while (channel.poll(payload_)) {
        if (type_of(payload_) == MessageType::kAbort) return decode_abort(payload_);
      }
    } catch (const std::exception&) {
      // Closed or garbled: there is no message.
    }
    return std::nullopt;
  };
  if (parent_) {
    if (auto error = abort_from(*parent_)) return error;
  }
  for (const Branch& child : children_) {
    if (auto error = abort_from(*child.channel)) return error;
  }
  return std::nullopt;
}

void Controller::post_abort(const Error& error) noexcept {
  std::string payload;
  encode(error, payload);
  for (const Branch& child : children_) send_last(*child.channel, payload);
  if (parent_ && !farewell_) send_last(*parent_, payload);
}

std::vector<Stalled> Controller::stalled(std::chrono::duration<double> at_least) const {
  return coordinator_ ? coordinator_->stalled(Clock::now(), at_least) : std::vector<Stalled>{};
}

// Tuning ------------------------------------------------------------------------

void Controller::tune(const Tuning& tuning) {
  coordinator_->set_fusion_bytes_max(tuning.fusion_bytes_max);
  payload_.clear();
  encode(tuning, payload_);
  pass_on_tuning();
}

void Controller::pass_on_tuning() {
  send_to_children(payload_);
  work_.emplace_back().tuning = decode_tuning(payload_);
}

// Inquiries ---------------------------------------------------------------------

void Controller::ask(const Inquiry& inquiry) {
  payload_.clear();
  encode(inquiry, payload_);
  pass_on_inquiry();
}

// Who dozes has nothing pending and would look too late.
void Controller::pass_on_inquiry() {
  inquiry_ = decode_inquiry(payload_);
  send_to_children(payload_);
  for (const Branch& child : children_) child.channel->nudge();
}

void Controller::answer(const Answer& answer) {
  payload_.clear();
  encode(answer, payload_);
  pass_on_answer();
}

void Controller::pass_on_answer() {
  Answer answer = decode_answer(payload_);
  if (coordinator_) {
    answers_.push_back(std::move(answer));
  } else if (parent_ && !farewell_) {
    parent_->post(payload_);
    parent_->nudge();
  }
}

}  // namespace polyhvd
