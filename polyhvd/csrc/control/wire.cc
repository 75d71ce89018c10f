#include "control/wire.h"

#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

namespace polyhvd {

static_assert(std::endian::native == std::endian::little, "frames are the machine's own bytes");

// ---- writing ----------------------------------------------------------------

namespace {

using Count = std::uint32_t;
using Hit = Report::Hit;
using TurnHit = Report::TurnHit;
static_assert(sizeof(Hit) == 8 && sizeof(TurnHit) == 16 && sizeof(Resend) == 16,
              "copied to the wire as they lie");

// Several fields by one append: appending is what costs.
template <class... T>
void put(std::string& out, const T&... values) {
  static_assert((std::is_trivially_copyable_v<T> && ...));
  char bytes[(sizeof(T) + ...)];
  char* at = bytes;
  ((std::memcpy(at, &values, sizeof values), at += sizeof values), ...);
  out.append(bytes, sizeof bytes);
}

template <class T>
Count count_of(const T& items) {
  return static_cast<Count>(items.size());
}

template <class T>
void put_array(std::string& out, const std::vector<T>& items) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (items.empty()) return;
  out.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

void put_text(std::string& out, const std::string& text) {
  put(out, count_of(text));
  out.append(text);
}

// The fields that requests and agreements share.
template <class Operation>
void put_operation(std::string& out, const Operation& op) {
  put(out, op.process_set, op.kind, op.op, op.dtype, op.device, op.root, op.priority, op.scale.pre,
      op.scale.post, count_of(op.shapes), count_of(op.dtypes));
  put_array(out, op.dtypes);
  for (const Shape& shape : op.shapes) {
    put(out, count_of(shape));
    put_array(out, shape);
  }
  put_text(out, op.name);
}

void put_requests(std::string& out, const std::vector<Request>& requests) {
  for (const Request& request : requests) {
    put(out, request.rank);
    put_operation(out, request);
    put_text(out, request.where);
    put(out, request.turn);
  }
}

void put_departure(std::string& out, const Departure& departure) {
  put(out, departure.rank);
  put_text(out, departure.words);
}

void put_error(std::string& out, const Error& error) {
  put(out, error.code);
  put_text(out, error.message);
}

}  // namespace

void encode(const Report& report, std::string& out) {
  const bool has_turns = !report.subtree_turns.empty() || !report.turns.empty();
  put(out, MessageType::kReport, static_cast<std::uint8_t>(has_turns),
      count_of(report.subtree_hits), count_of(report.hits), count_of(report.subtree_requests),
      count_of(report.requests), count_of(report.departures), count_of(report.answers));
  if (has_turns) put(out, count_of(report.subtree_turns), count_of(report.turns));
  put_array(out, report.subtree_hits);
  put_array(out, report.hits);
  put_array(out, report.subtree_turns);
  put_array(out, report.turns);
  put_requests(out, report.subtree_requests);
  put_requests(out, report.requests);
  for (const Departure& departure : report.departures) put_departure(out, departure);
  put_array(out, report.answers);
}

void encode(const Decision& decision, std::string& out) {
  put(out, MessageType::kDecision, count_of(decision.definitions), count_of(decision.resends),
      count_of(decision.refusals), count_of(decision.batches), count_of(decision.evictions));
  for (const Definition& definition : decision.definitions) {
    put(out, definition.id);
    put_operation(out, definition.agreement);
    put(out, count_of(definition.agreement.rows));
    put_array(out, definition.agreement.rows);
  }
  put_array(out, decision.resends);
  for (const Refusal& refusal : decision.refusals) {
    put(out, refusal.process_set);
    put_text(out, refusal.name);
    put_error(out, refusal.error);
    put(out, refusal.kind, refusal.turn);
    put_departure(out, refusal.cause);
  }
  for (const Batch& batch : decision.batches) {
    put(out, count_of(batch.ids), static_cast<std::uint8_t>(!batch.turns.empty()));
    put_array(out, batch.ids);
    put_array(out, batch.turns);
  }
  put_array(out, decision.evictions);
}

void encode(const Error& abort_reason, std::string& out) {
  put(out, MessageType::kAbort);
  put_error(out, abort_reason);
}

void encode_farewell(const Departure& departure, std::string& out) {
  put(out, MessageType::kFarewell);
  put_departure(out, departure);
}

void encode(const Inquiry& inquiry, std::string& out) {
  put(out, MessageType::kInquiry, inquiry.number, count_of(inquiry.ranks));
  put_array(out, inquiry.ranks);
}

void encode(const Answer& answer, std::string& out) {
  put(out, MessageType::kAnswer, answer.inquiry, answer.rank,
      static_cast<std::uint8_t>(answer.conclusive));
  put_text(out, answer.text);
}

void encode(const Tuning& tuning, std::string& out) {
  put(out, MessageType::kTuning, tuning.fusion_bytes_max, tuning.cycle_us, tuning.chunk_bytes,
      tuning.direct_bytes_max, tuning.notice);
}

// ---- reading ----------------------------------------------------------------

namespace {

constexpr std::size_t kOperationBytesMin = 4 + 4 * 1 + 2 * 4 + 2 * 8 + 3 * 4;
constexpr std::size_t kRequestBytesMin = 4 + kOperationBytesMin + 4 + 8;
constexpr std::size_t kDefinitionBytesMin = 4 + kOperationBytesMin + 4;
constexpr std::size_t kDepartureBytesMin = 4 + 4;
constexpr std::size_t kRefusalBytesMin = 4 + 4 + 1 + 4 + 1 + 8 + kDepartureBytesMin;
constexpr std::size_t kBatchBytesMin = 4 + 1 + 4;

[[noreturn]] void fail_at(std::size_t offset, const char* reason) {
  throw Failure(ErrorCode::kInternal,
                "control frame: " + std::string(reason) + " at byte " + std::to_string(offset));
}

// Takes fields off the front of a payload; never reads past its end.
class Reader {
 public:
  explicit Reader(std::string_view payload, MessageType expected) : payload_(payload) {
    if (type_of(payload) != expected) fail("a message of another type");
    at_ = 1;
  }

  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    if (remaining() < sizeof(T)) fail("the payload ends early");
    T value;
    std::memcpy(&value, payload_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  // A number of elements of at least `bytes_min` each that can still follow.
  Count get_count(std::size_t bytes_min) { return checked(get<Count>(), bytes_min); }
  Count checked(Count count, std::size_t bytes_min) const {
    if (count > remaining() / bytes_min) fail("a length exceeds the payload");
    return count;
  }

  template <class T>
  std::vector<T> get_array(Count count) {
    static_assert(std::is_trivially_copyable_v<T>);
    checked(count, sizeof(T));
    std::vector<T> items(count);
    if (count > 0) std::memcpy(items.data(), payload_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return items;
  }

  std::string get_text() {
    const Count bytes = get_count(1);
    std::string text(payload_.substr(at_, bytes));
    at_ += bytes;
    return text;
  }

  bool get_flag() {
    const auto flag = get<std::uint8_t>();
    if (flag > 1) fail("a flag that is neither 0 nor 1");
    return flag != 0;
  }

  // An enumerator from 0 to `last`.
  template <class E>
  E get_enum(E last, const char* reason) {
    const auto value = get<E>();
    if (value > last) fail(reason);
    return value;
  }

  void finish() const {
    if (remaining() != 0) fail("bytes beyond the end of the message");
  }
  [[noreturn]] void fail(const char* reason) const { fail_at(at_, reason); }

 private:
  std::size_t remaining() const noexcept { return payload_.size() - at_; }

  std::string_view payload_;
  std::size_t at_ = 0;
};

Shape get_shape(Reader& in) {
  const auto dimensions = in.get<Count>();
  if (dimensions > kTensorRankMax) in.fail("a tensor of too many dimensions");
  Shape shape = in.get_array<std::int64_t>(dimensions);
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (size < 0) in.fail("a negative dimension");
    if (size > kElementsMax / product) in.fail("a tensor of too many elements");
    if (size > 0) product *= size;
  }
  return shape;
}

template <class Operation>
void get_operation(Reader& in, Operation& op) {
  op.process_set = in.get<ProcessSetId>();
  op.kind = in.get_enum(OpKind::kRemoveProcessSet, "an unknown operation");
  op.op = in.get_enum(ReduceOp::kProduct, "an unknown reduction");
  op.dtype = in.get_enum(DType::kUint64, "an unknown element type");
  op.device = in.get_enum(DeviceKind::kCuda, "an unknown device");
  op.root = in.get<std::int32_t>();
  if (op.root < -1) in.fail("a negative root rank");
  op.priority = in.get<std::int32_t>();
  op.scale.pre = in.get<double>();
  op.scale.post = in.get<double>();
  const Count shapes = in.get_count(sizeof(Count));
  const auto dtypes = in.get<Count>();
  if (dtypes != 0 && dtypes != shapes) in.fail("element types that are not one for each tensor");
  op.dtypes = in.get_array<DType>(dtypes);
  for (const DType dtype : op.dtypes) {
    if (dtype > DType::kUint64) in.fail("an unknown element type");
  }
  op.shapes.reserve(shapes);
  for (Count i = 0; i < shapes; ++i) op.shapes.push_back(get_shape(in));
  op.name = in.get_text();
}

std::int32_t checked_rank(Reader& in, std::int32_t rank) {
  if (rank < 0) in.fail("a negative rank");
  return rank;
}

Departure get_departure(Reader& in) {
  Departure departure;
  departure.rank = checked_rank(in, in.get<std::int32_t>());
  departure.words = in.get_text();
  if (departure.words.size() > kLastWordsBytesMax) in.fail("last words that are too long");
  return departure;
}

Request get_request(Reader& in) {
  Request request;
  request.rank = checked_rank(in, in.get<std::int32_t>());
  get_operation(in, request);
  request.where = in.get_text();
  request.turn = in.get<Turn>();
  return request;
}

std::vector<TurnHit> get_turn_hits(Reader& in, Count count) {
  std::vector<TurnHit> hits = in.get_array<TurnHit>(count);
  for (const TurnHit& hit : hits) {
    checked_rank(in, hit.rank);
    if (hit.turn == 0) in.fail("a call without a name that has no turn");
  }
  return hits;
}

std::vector<Request> get_requests(Reader& in, Count count) {
  std::vector<Request> requests;
  requests.reserve(in.checked(count, kRequestBytesMin));
  for (Count i = 0; i < count; ++i) requests.push_back(get_request(in));
  return requests;
}

Definition get_definition(Reader& in) {
  Definition definition;
  Agreement& agreement = definition.agreement;
  definition.id = in.get<CacheId>();
  get_operation(in, agreement);
  agreement.rows = in.get_array<std::int64_t>(in.get<Count>());
  for (const std::int64_t rows : agreement.rows) {
    if (rows < 0) in.fail("a negative number of rows");
  }
  const std::size_t tensors = agreement.shapes.size();
  if (tensors == 0 ? !agreement.rows.empty() : agreement.rows.size() % tensors != 0) {
    in.fail("rows that do not divide among the tensors");
  }
  return definition;
}

Error get_error(Reader& in) {
  Error error;
  error.code = in.get_enum(ErrorCode::kInternal, "an unknown error code");
  if (static_cast<int>(error.code) == 0) in.fail("an unknown error code");
  error.message = in.get_text();
  return error;
}

Refusal get_refusal(Reader& in) {
  Refusal refusal;
  refusal.process_set = in.get<ProcessSetId>();
  refusal.name = in.get_text();
  refusal.error = get_error(in);
  refusal.kind = in.get_enum(OpKind::kRemoveProcessSet, "an unknown operation");
  refusal.turn = in.get<Turn>();
  refusal.cause = get_departure(in);
  return refusal;
}

}  // namespace

MessageType type_of(std::string_view payload) {
  if (payload.empty()) fail_at(0, "an empty payload");
  const auto type = static_cast<MessageType>(payload[0]);
  if (type < MessageType::kReport || type > MessageType::kTuning) fail_at(0, "an unknown type");
  return type;
}

Report decode_report(std::string_view payload) {
  Reader in(payload, MessageType::kReport);
  const bool has_turns = in.get_flag();
  const auto subtree_hits = in.get<Count>();
  const auto hits = in.get<Count>();
  const auto subtree_requests = in.get<Count>();
  const auto requests = in.get<Count>();
  const auto departures = in.get<Count>();
  const auto answers = in.get<Count>();
  const auto subtree_turns = has_turns ? in.get<Count>() : 0;
  const auto turns = has_turns ? in.get<Count>() : 0;
  if (has_turns && subtree_turns == 0 && turns == 0) in.fail("no turns where there are to be some");
  Report report;
  report.subtree_hits = in.get_array<CacheId>(subtree_hits);
  report.hits = in.get_array<Hit>(hits);
  for (const Hit& hit : report.hits) checked_rank(in, hit.rank);
  if (has_turns) {
    report.subtree_turns = get_turn_hits(in, subtree_turns);
    report.turns = get_turn_hits(in, turns);
  }
  report.subtree_requests = get_requests(in, subtree_requests);
  report.requests = get_requests(in, requests);
  report.departures.reserve(in.checked(departures, kDepartureBytesMin));
  for (Count i = 0; i < departures; ++i) report.departures.push_back(get_departure(in));
  report.answers = in.get_array<Resend>(answers);
  for (const Resend& answer : report.answers) checked_rank(in, answer.rank);
  in.finish();
  return report;
}

Decision decode_decision(std::string_view payload) {
  Reader in(payload, MessageType::kDecision);
  const auto definitions = in.get<Count>();
  const auto resends = in.get<Count>();
  const auto refusals = in.get<Count>();
  const auto batches = in.get<Count>();
  const auto evictions = in.get<Count>();
  Decision decision;
  decision.definitions.reserve(in.checked(definitions, kDefinitionBytesMin));
  for (Count i = 0; i < definitions; ++i) decision.definitions.push_back(get_definition(in));
  decision.resends = in.get_array<Resend>(resends);
  for (const Resend& resend : decision.resends) checked_rank(in, resend.rank);
  decision.refusals.reserve(in.checked(refusals, kRefusalBytesMin));
  for (Count i = 0; i < refusals; ++i) decision.refusals.push_back(get_refusal(in));
  decision.batches.reserve(in.checked(batches, kBatchBytesMin));
  for (Count i = 0; i < batches; ++i) {
    const auto ids = in.get<Count>();
    const bool has_turns = in.get_flag();
    if (ids == 0) in.fail("an empty batch");
    Batch& batch = decision.batches.emplace_back();
    batch.ids = in.get_array<CacheId>(ids);
    if (has_turns) batch.turns = in.get_array<Turn>(ids);
  }
  decision.evictions = in.get_array<CacheId>(evictions);
  in.finish();
  return decision;
}

Error decode_abort(std::string_view payload) {
  Reader in(payload, MessageType::kAbort);
  Error error = get_error(in);
  in.finish();
  return error;
}

Departure decode_farewell(std::string_view payload) {
  Reader in(payload, MessageType::kFarewell);
  Departure departure = get_departure(in);
  in.finish();
  return departure;
}

Inquiry decode_inquiry(std::string_view payload) {
  Reader in(payload, MessageType::kInquiry);
  Inquiry inquiry;
  inquiry.number = in.get<std::uint32_t>();
  const auto ranks = in.get<Count>();
  if (ranks > kRanksAskedMax) in.fail("an inquiry about too many ranks");
  inquiry.ranks = in.get_array<std::int32_t>(ranks);
  for (const std::int32_t rank : inquiry.ranks) checked_rank(in, rank);
  in.finish();
  return inquiry;
}

Answer decode_answer(std::string_view payload) {
  Reader in(payload, MessageType::kAnswer);
  Answer answer;
  answer.inquiry = in.get<std::uint32_t>();
  answer.rank = checked_rank(in, in.get<std::int32_t>());
  const auto conclusive = in.get<std::uint8_t>();
  if (conclusive > 1) in.fail("an answer that is neither conclusive nor not");
  answer.conclusive = conclusive == 1;
  answer.text = in.get_text();
  if (answer.text.size() > kAnswerBytesMax) in.fail("an answer that is too long");
  in.finish();
  return answer;
}

Tuning decode_tuning(std::string_view payload) {
  Reader in(payload, MessageType::kTuning);
  Tuning tuning;
  tuning.fusion_bytes_max = in.get<std::uint64_t>();
  tuning.cycle_us = in.get<std::uint32_t>();
  tuning.chunk_bytes = in.get<std::uint32_t>();
  tuning.direct_bytes_max = in.get<std::uint32_t>();
  tuning.notice = in.get<std::uint32_t>();
  in.finish();
  return tuning;
}

}  // namespace polyhvd
