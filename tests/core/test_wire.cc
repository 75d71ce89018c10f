#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <random>

#include "control/wire.h"

namespace polyhvd {
namespace {

template <class Message>
std::string encoded(const Message& message) {
  std::string out;
  encode(message, out);
  return out;
}

Request sample_request() {
  Request request;
  request.rank = 3;
  request.process_set = 2;
  request.kind = OpKind::kBroadcast;
  request.op = ReduceOp::kProduct;
  request.dtype = static_cast<DType>(kDTypeCount - 1);
  request.device = DeviceKind::kCuda;
  request.root = 1;
  request.priority = -7;
  request.scale = {0.1, -0.0};
  request.shapes = {{10, 0, 4}, {}, {std::int64_t{1} << 59}};
  request.name = std::string("fc.weight\0\xff", 11);
  request.where = "train.py:88";
  request.turn = ~Turn{0};
  return request;
}

Report sample_report() {
  Report report;
  report.subtree_hits = {1, 0xffffffffu};
  report.hits = {{0, 5}, {2147483647, 6}};
  report.subtree_requests = {Request{}, sample_request()};
  report.requests = {sample_request(), Request{}};
  report.departures = {{4}, {0, "ValueError: bad row (train.py, line 31)"}};
  report.subtree_turns = {{0, 7, 1}, {0, 8, Turn{1} << 40}};
  report.turns = {{2, 7, 3}};
  return report;
}

Decision sample_decision() {
  Decision decision;
  Definition definition;
  definition.id = 9;
  definition.agreement.kind = OpKind::kAllgather;
  definition.agreement.shapes = {{5, 4}, {1}};
  definition.agreement.rows = {2, 1, 3, 0};
  definition.agreement.name = "g";
  definition.agreement.scale = {std::numeric_limits<double>::denorm_min(), 1e300};
  decision.definitions = {definition, Definition{}};
  decision.resends = {{1, 8}, {2, 8, 40}};
  decision.refusals = {{2, "x", {ErrorCode::kRankMismatch, "Mismatched data types: ..."}},
                       {1, "y", {ErrorCode::kPeerDeparted, ""}, OpKind::kBarrier, 6, {3, "E: x"}}};
  decision.batches = {{{9, 4, 2}, {0, 5, 6}}, {{7}}};
  decision.evictions = {3, 1};
  return decision;
}

void check_equal(const Request& a, const Request& b) {
  CHECK(a.rank == b.rank);
  CHECK(a.process_set == b.process_set);
  CHECK(a.kind == b.kind);
  CHECK(a.op == b.op);
  CHECK(a.dtype == b.dtype);
  CHECK(a.device == b.device);
  CHECK(a.root == b.root);
  CHECK(a.priority == b.priority);
  CHECK(std::memcmp(&a.scale, &b.scale, sizeof a.scale) == 0);
  CHECK(a.shapes == b.shapes);
  CHECK(a.name == b.name);
  CHECK(a.where == b.where);
  CHECK(a.turn == b.turn);
}

std::string decoding_error(const std::string& payload) {
  try {
    switch (type_of(payload)) {
      case MessageType::kReport:
        decode_report(payload);
        break;
      case MessageType::kDecision:
        decode_decision(payload);
        break;
      case MessageType::kAbort:
        decode_abort(payload);
        break;
      case MessageType::kFarewell:
        decode_farewell(payload);
        break;
      case MessageType::kInquiry:
        decode_inquiry(payload);
        break;
      case MessageType::kAnswer:
        decode_answer(payload);
        break;
      case MessageType::kTuning:
        decode_tuning(payload);
        break;
    }
  } catch (const Failure& failure) {
    CHECK(failure.error().code == ErrorCode::kInternal);
    return failure.error().message;
  }
  return "";
}

// The payload of a report with one request that `change` has spoilt.
template <class Change>
std::string error_of_request(Change change) {
  Report report;
  report.requests = {sample_request()};
  change(report.requests[0]);
  return decoding_error(encoded(report));
}

bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("a report comes back as it was") {
  const Report before = sample_report();
  const std::string payload = encoded(before);
  CHECK(type_of(payload) == MessageType::kReport);
  const Report after = decode_report(payload);
  CHECK(after.subtree_hits == before.subtree_hits);
  REQUIRE(after.hits.size() == 2);
  CHECK(after.hits[1].rank == 2147483647);
  CHECK(after.hits[1].id == 6);
  REQUIRE(after.subtree_requests.size() == 2);
  check_equal(after.subtree_requests[1], before.subtree_requests[1]);
  REQUIRE(after.requests.size() == 2);
  check_equal(after.requests[0], before.requests[0]);
  check_equal(after.requests[1], before.requests[1]);
  CHECK(after.departures == before.departures);
  REQUIRE(after.subtree_turns.size() == 2);
  CHECK(after.subtree_turns[1].id == 8);
  CHECK(after.subtree_turns[1].turn == Turn{1} << 40);
  REQUIRE(after.turns.size() == 1);
  CHECK(after.turns[0].rank == 2);
}

TEST_CASE("a decision comes back as it was") {
  const Decision before = sample_decision();
  const std::string payload = encoded(before);
  CHECK(type_of(payload) == MessageType::kDecision);
  const Decision after = decode_decision(payload);
  REQUIRE(after.definitions.size() == 2);
  CHECK(after.definitions[0].id == 9);
  CHECK(after.definitions[0].agreement == before.definitions[0].agreement);
  CHECK(after.definitions[1].agreement == before.definitions[1].agreement);
  REQUIRE(after.resends.size() == 2);
  CHECK(after.resends[0].rank == 1);
  CHECK(after.resends[0].id == 8);
  CHECK(after.resends[0].turn == 0);
  CHECK(after.resends[1].turn == 40);
  REQUIRE(after.refusals.size() == 2);
  CHECK(after.refusals[1].kind == OpKind::kBarrier);
  CHECK(after.refusals[1].turn == 6);
  CHECK(after.refusals[0].cause == Departure{});
  CHECK(after.refusals[1].cause == Departure{3, "E: x"});
  CHECK(after.refusals[0].process_set == 2);
  CHECK(after.refusals[0].name == "x");
  CHECK(after.refusals[0].error.code == ErrorCode::kRankMismatch);
  CHECK(after.refusals[0].error.message == "Mismatched data types: ...");
  REQUIRE(after.batches.size() == 2);
  CHECK(after.batches[0].ids == before.batches[0].ids);
  CHECK(after.batches[0].turns == before.batches[0].turns);
  CHECK(after.batches[1].ids == before.batches[1].ids);
  CHECK(after.batches[1].turns.empty());
  CHECK(after.evictions == before.evictions);
}

TEST_CASE("an abort comes back as it was, and empty messages stay empty") {
  const Error error = decode_abort(encoded(Error{ErrorCode::kPeerLost, "rank 2 died"}));
  CHECK(error.code == ErrorCode::kPeerLost);
  CHECK(error.message == "rank 2 died");
  CHECK(decode_report(encoded(Report{})).empty());
  CHECK(decode_decision(encoded(Decision{})).empty());
}

TEST_CASE("an inquiry and an answer come back as they were") {
  const Inquiry inquiry = decode_inquiry(encoded(Inquiry{7, {0, 2147483647}}));
  CHECK(inquiry.number == 7);
  CHECK(inquiry.ranks == std::vector<std::int32_t>{0, 2147483647});
  for (const bool conclusive : {false, true}) {
    const Answer answer = decode_answer(encoded(Answer{7, 3, conclusive, "alive\n  at"}));
    CHECK(answer.inquiry == 7);
    CHECK(answer.rank == 3);
    CHECK(answer.conclusive == conclusive);
    CHECK(answer.text == "alive\n  at");
  }
}

TEST_CASE("inquiries and answers beyond their bounds are refused") {
  CHECK(decoding_error(encoded(Inquiry{1, std::vector<std::int32_t>(kRanksAskedMax)})) == "");
  CHECK(mentions(decoding_error(encoded(Inquiry{1, std::vector<std::int32_t>(kRanksAskedMax + 1)})),
                 "too many ranks"));
  CHECK(mentions(decoding_error(encoded(Inquiry{1, {-1}})), "negative rank"));
  CHECK(decoding_error(encoded(Answer{1, 0, true, std::string(kAnswerBytesMax, 'x')})) == "");
  CHECK(mentions(decoding_error(encoded(Answer{1, 0, true, std::string(kAnswerBytesMax + 1, 'x')})),
                 "too long"));
  CHECK(mentions(decoding_error(encoded(Answer{1, -1, true, ""})), "negative rank"));
  std::string neither = encoded(Answer{1, 0, true, ""});
  neither[9] = 2;
  CHECK(mentions(decoding_error(neither), "conclusive"));
}

std::string farewell(const Departure& departure) {
  std::string out;
  encode_farewell(departure, out);
  return out;
}

TEST_CASE("a farewell comes back as it was") {
  for (const Departure& departure : {Departure{7, ""}, Departure{0, "ValueError: bad row"}}) {
    CHECK(decode_farewell(farewell(departure)) == departure);
  }
}

TEST_CASE("last words beyond their bound are refused") {
  for (const bool is_longer : {false, true}) {
    const Departure departure{1, std::string(kLastWordsBytesMax + is_longer, 'x')};
    Report report;
    report.departures = {departure};
    Decision decision;
    decision.refusals = {
        {0, "x", {ErrorCode::kPeerDeparted, ""}, OpKind::kAllreduce, 0, departure}};
    for (const std::string& payload : {encoded(report), encoded(decision), farewell(departure)}) {
      CHECK(mentions(decoding_error(payload), "too long") == is_longer);
    }
  }
}

TEST_CASE("encoding appends") {
  std::string out = "before";
  encode(Report{}, out);
  CHECK(out == "before" + encoded(Report{}));
}

TEST_CASE("the hot frames are small") {
  Report report;
  report.subtree_hits = {1};
  CHECK(encoded(report).size() <= 32);
  Decision decision;
  decision.batches = {{{1}}};
  CHECK(encoded(decision).size() <= 32);
}

TEST_CASE("an empty payload, an unknown type and a message of another type are refused") {
  CHECK_THROWS_AS(type_of(""), Failure);
  CHECK_THROWS_AS(type_of(std::string_view("\0", 1)), Failure);
  CHECK_THROWS_AS(type_of("\10"), Failure);
  CHECK_THROWS_AS(type_of("\xff"), Failure);
  CHECK_THROWS_AS(decode_report(encoded(Decision{})), Failure);
  CHECK_THROWS_AS(decode_decision(encoded(Report{})), Failure);
  CHECK_THROWS_AS(decode_abort(encoded(Report{})), Failure);
  CHECK_THROWS_AS(decode_report(""), Failure);
}

TEST_CASE("every shorter payload and any longer one is refused") {
  for (const std::string& whole : {encoded(sample_report()), encoded(sample_decision()),
                                   encoded(Error{ErrorCode::kTimeout, "t"}), farewell({1, "t"}),
                                   encoded(Inquiry{1, {2, 3}}), encoded(Answer{1, 2, true, "t"})}) {
    CHECK(decoding_error(whole) == "");
    for (std::size_t length = 1; length < whole.size(); ++length) {
      REQUIRE(decoding_error(whole.substr(0, length)) != "");
    }
    CHECK(mentions(decoding_error(whole + '\0'), "beyond the end"));
  }
}

TEST_CASE("a length that the payload cannot hold costs no memory") {
  for (std::size_t field = 0; field < 6; ++field) {
    std::string payload = encoded(Report{});
    std::memset(payload.data() + 2 + 4 * field, 0xff, 4);
    CHECK(mentions(decoding_error(payload), "at byte"));
  }
  for (std::size_t field = 0; field < 5; ++field) {
    std::string payload = encoded(Decision{});
    std::memset(payload.data() + 1 + 4 * field, 0xff, 4);
    CHECK(mentions(decoding_error(payload), "at byte"));
  }
}

TEST_CASE("enumerators out of range are refused") {
  CHECK(mentions(error_of_request([](Request& r) { r.kind = static_cast<OpKind>(kOpKindCount); }),
                 "operation"));
  constexpr auto kUnknownType = static_cast<DType>(kDTypeCount);
  CHECK(mentions(error_of_request([](Request& r) { r.dtypes = {DType::kInt8, kUnknownType}; }),
                 "element type"));
  CHECK(mentions(error_of_request([](Request& r) { r.dtypes = {DType::kInt8}; }), "one for each"));
  CHECK(
      mentions(error_of_request([](Request& r) { r.op = static_cast<ReduceOp>(6); }), "reduction"));
  CHECK(mentions(error_of_request([](Request& r) { r.dtype = kUnknownType; }), "element type"));
  CHECK(mentions(error_of_request([](Request& r) { r.device = static_cast<DeviceKind>(2); }),
                 "device"));
  CHECK(mentions(decoding_error(encoded(Error{static_cast<ErrorCode>(0), ""})), "error code"));
  CHECK(mentions(decoding_error(encoded(Error{static_cast<ErrorCode>(9), ""})), "error code"));
}

TEST_CASE("negative and boundless numbers are refused") {
  CHECK(mentions(error_of_request([](Request& r) { r.rank = -1; }), "negative rank"));
  CHECK(mentions(error_of_request([](Request& r) { r.root = -2; }), "root"));
  CHECK(mentions(error_of_request([](Request& r) { r.shapes = {{2, -1}}; }), "negative dimension"));
  CHECK(mentions(error_of_request([](Request& r) { r.shapes = {Shape(65, 1)}; }), "dimensions"));
  CHECK(error_of_request([](Request& r) { r.shapes = {Shape(64, 1)}; }) == "");
  CHECK(mentions(
      error_of_request([](Request& r) { r.shapes = {{std::numeric_limits<std::int64_t>::max()}}; }),
      "too many elements"));
  // Zero elements do not excuse dimensions whose product overflows on the way.
  for (const Shape& shape : {Shape{0, std::int64_t{1} << 40, std::int64_t{1} << 40},
                             Shape{std::int64_t{1} << 40, std::int64_t{1} << 40, 0}}) {
    CHECK(mentions(error_of_request([&](Request& r) { r.shapes = {shape}; }), "too many elements"));
  }
}

TEST_CASE("negative ranks in hits, departures and resends are refused") {
  Report report;
  report.hits = {{-1, 1}};
  CHECK(mentions(decoding_error(encoded(report)), "negative rank"));
  report = {};
  report.departures = {{-1}};
  CHECK(mentions(decoding_error(encoded(report)), "negative rank"));
  Decision decision;
  decision.resends = {{-1, 1}};
  CHECK(mentions(decoding_error(encoded(decision)), "negative rank"));
}

TEST_CASE("turns that belong to nothing, and flags that are none, are refused") {
  Report report;
  report.turns = {{1, 2, 0}};
  CHECK(mentions(decoding_error(encoded(report)), "no turn"));
  report.turns = {{-1, 2, 3}};
  CHECK(mentions(decoding_error(encoded(report)), "negative rank"));
  std::string payload = encoded(Report{});
  payload[1] = 2;
  CHECK(mentions(decoding_error(payload), "flag"));
  payload[1] = 1;
  CHECK(mentions(decoding_error(payload + std::string(8, '\0')), "no turns"));
  std::memset(payload.data() + 2, 0, payload.size() - 2);
  CHECK(mentions(decoding_error(payload + std::string(8, '\xff')), "at byte"));
}

TEST_CASE("an empty batch and rows that fit no tensors are refused") {
  Decision decision;
  decision.batches = {{{1}}, {}, {{2, 3}}};
  CHECK(mentions(decoding_error(encoded(decision)), "empty batch"));
  decision = sample_decision();
  decision.definitions[0].agreement.rows.pop_back();
  CHECK(mentions(decoding_error(encoded(decision)), "divide"));
  decision.definitions[0].agreement.rows = {-1, 1};
  CHECK(mentions(decoding_error(encoded(decision)), "negative"));
  decision.definitions[0].agreement.shapes.clear();
  CHECK(decoding_error(encoded(decision)) != "");
}

TEST_CASE("garbled payloads are refused or read, and what is read can be written") {
  std::mt19937 random(17);
  const std::string samples[] = {encoded(sample_report()), encoded(sample_decision()),
                                 encoded(Error{ErrorCode::kInternal, "why"})};
  int refused = 0;
  for (int i = 0; i < 60000; ++i) {
    std::string payload = samples[random() % 3];
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips) {
      payload[random() % payload.size()] = static_cast<char>(random() % 3 ? random() : 0xff);
    }
    if (random() % 4 == 0) payload.resize(random() % payload.size() + 1);
    std::string again;
    try {
      if (payload[0] == 1) again = encoded(decode_report(payload));
      if (payload[0] == 2) again = encoded(decode_decision(payload));
      if (payload[0] == 3) again = encoded(decode_abort(payload));
    } catch (const Failure&) {
      ++refused;
      continue;
    }
    // Bytes are copied both ways, so what was read is what was written.
    if (payload[0] >= 1 && payload[0] <= 3) REQUIRE(again == payload);
  }
  CHECK(refused > 1000);
}

TEST_CASE("pure noise is refused or read without harm") {
  std::mt19937 random(23);
  for (int i = 0; i < 20000; ++i) {
    std::string payload(1 + random() % 200, 0);
    for (char& byte : payload) byte = static_cast<char>(random() % 5 ? 0 : random());
    payload[0] = static_cast<char>(1 + random() % 3);
    decoding_error(payload);
  }
}

}  // namespace
}  // namespace polyhvd
