#include <doctest/doctest.h>

#include "control/stall_inspector.h"

namespace polyhvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Stalled stalled(std::string name, int age_s, std::vector<int> ready, std::vector<int> absent) {
  return {kWorld,
          std::move(name),
          seconds(age_s),
          std::move(ready),
          std::move(absent),
          OpKind::kAllreduce,
          {},
          "train.py:7"};
}

// An inspector whose ranks are processes with ids of their own.
struct Desk {
  explicit Desk(StallTimes times = {})
      : inspector(times, [](int rank) { return "pid " + std::to_string(100 + rank); }) {}

  std::optional<Inquiry> begin() { return inspector.begin(waiting, now); }
  std::string report() {
    const auto report = inspector.finish(waiting, now);
    return report ? report->text : "";
  }
  void answer(int rank, std::string text, bool conclusive = true, std::uint32_t inquiry = 1) {
    inspector.add({inquiry, rank, conclusive, std::move(text)});
  }

  StallInspector inspector;
  std::vector<Stalled> waiting{stalled("x", 61, {0, 2}, {1, 3})};
  Time now{seconds(1000)};
};

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("the absent ranks are asked once, and reported when all have answered") {
  Desk desk;
  const auto inquiry = desk.begin();
  REQUIRE(inquiry);
  CHECK(inquiry->number == 1);
  CHECK(inquiry->ranks == std::vector<std::int32_t>{1, 3});
  CHECK(!desk.begin());
  desk.answer(1, "alive, in save (train.py:6)\nThread \"MainThread\"\n  File");
  CHECK(!desk.inspector.is_complete(desk.now));
  desk.answer(3, "stopped");
  REQUIRE(desk.inspector.is_complete(desk.now));
  CHECK(desk.report() ==
        "stalled: ranks have not submitted operations that others wait for:\n"
        "  ranks 0, 2 wait for ranks 1, 3 in 1 operation:\n"
        "    'x', for 61 s\n"
        "  rank 1 (pid 101): alive, in save (train.py:6)\n"
        "    Thread \"MainThread\"\n"
        "      File\n"
        "  rank 3 (pid 103): stopped");
}

TEST_CASE("a report begins with the one rank that has submitted, and with what the others have") {
  Desk desk;
  desk.waiting = {stalled("x", 61, {0}, {1, 2, 3}), stalled("y", 5, {2}, {0, 1, 3})};
  desk.begin();
  CHECK(desk.report().starts_with(
      "stalled: only rank 0 has submitted allreduce 'x' (train.py:7), 61 s "
      "ago; ranks 1, 3 have submitted nothing; rank 2 has submitted "
      "allreduce 'y' (train.py:7)\n"
      "  rank 0 waits for ranks 1-3 in 1 operation:\n"
      "    'x', for 61 s\n"));
}

TEST_CASE("ranks that wait for each other are named if one of them has begun later") {
  Desk desk;
  for (const int age_s : {5, 20}) {
    desk.waiting = {stalled("x", 61, {0}, {1}), stalled("y", age_s, {1}, {0})};
    desk.begin();
    const bool is_named =
        mentions(desk.report(), "\n  they wait for each other: rank 0 is at its ");
    CHECK(is_named == (age_s == 20));
    desk.now += seconds(200);
  }
}

TEST_CASE("the one rank that has submitted is asked, too, if the line of its call is unknown") {
  Desk desk;
  desk.waiting = {stalled("x", 61, {0}, {1})};
  CHECK(desk.begin()->ranks == std::vector<std::int32_t>{1});
  Desk other;
  other.waiting = desk.waiting;
  other.waiting[0].where.clear();
  CHECK(other.begin()->ranks == std::vector<std::int32_t>{0, 1});
  other.answer(0, "alive, in evaluate (train.py:31)");
  const std::string report = other.report();
  CHECK(report.starts_with("stalled: only rank 0 has submitted allreduce 'x', 61 s ago; rank 1 "));
  CHECK(mentions(report, "\n  rank 0 (pid 100): alive, in evaluate (train.py:31)\n"));
}

TEST_CASE("a report on the same calls is one line, with the setting that ends the job") {
  Desk desk;
  desk.waiting = {stalled("x", 61, {0}, {1}), stalled("y", 61, {0}, {1})};
  desk.begin();
  desk.report();
  desk.now += seconds(60);
  desk.waiting = {stalled("x", 121, {0}, {1}), stalled("y", 121, {0}, {1})};
  desk.begin();
  CHECK(desk.report() ==
        "still stalled: only rank 0 has submitted allreduce 'x' (train.py:7), 121 s ago; rank 1 "
        "has submitted nothing; 2 operations are stalled; set "
        "POLYHVD_STALL_SHUTDOWN_TIME_SECONDS to end a job that stalls");
  desk.now += seconds(60);
  desk.waiting = {stalled("x", 181, {0}, {1}), stalled("new", 61, {0}, {1})};
  desk.begin();
  CHECK(mentions(desk.report(), "\n  rank 0 waits for rank 1 in 2 operations:"));
}

TEST_CASE("a repeated report says after which time the job ends, if it does") {
  Desk desk({seconds(60), seconds(600), seconds(2)});
  for (const int age_s : {61, 121}) {
    desk.waiting = {stalled("x", age_s, {0, 2}, {1, 3})};
    desk.begin();
    if (age_s == 61) desk.report();
    if (age_s == 61) desk.now += seconds(60);
  }
  CHECK(desk.report() ==
        "still stalled: ranks 0, 2 wait for ranks 1, 3 in allreduce 'x' (train.py:7), for 121 s; "
        "the job ends after 600 s (POLYHVD_STALL_SHUTDOWN_TIME_SECONDS)");
}

TEST_CASE("a later call of a name that stalls as well is reported in full") {
  Desk desk;
  desk.begin();
  desk.report();
  desk.now += seconds(100);
  desk.waiting = {stalled("x", 61, {0, 2}, {1, 3})};
  desk.begin();
  CHECK(mentions(desk.report(), "\n  ranks 0, 2 wait for "));
}

TEST_CASE("operations that have waited for less than the limit are not reported") {
  Desk desk;
  desk.begin();
  desk.waiting = {stalled("x", 59, {0, 2}, {1, 3})};
  CHECK(desk.report() == "");
}

TEST_CASE("ranks that wait for the same are reported together") {
  Desk desk;
  desk.waiting = {stalled("x", 61, {0}, {1, 2, 3, 4, 5, 6})};
  desk.begin();
  for (const int rank : {1, 2, 3, 5, 6}) desk.answer(rank, "same");
  desk.answer(4, "other");
  const std::string report = desk.report();
  CHECK(mentions(report, "\n  ranks 1-3, 5, 6 (pid 101; pid 102; pid 103; pid 105; ...): same\n"));
  CHECK(mentions(report, "\n  rank 4 (pid 104): other"));
}

TEST_CASE("a rank that does not answer is reported when the time is over") {
  Desk desk;
  desk.begin();
  desk.answer(1, "its process exists", false);
  desk.now += milliseconds(1999);
  CHECK(!desk.inspector.is_complete(desk.now));
  desk.now += milliseconds(1);
  REQUIRE(desk.inspector.is_complete(desk.now));
  const std::string report = desk.report();
  CHECK(mentions(report, "rank 1 (pid 101): no answer in time, but its process exists"));
  CHECK(mentions(report, "rank 3 (pid 103): no answer in time: it, or a rank between"));
}

TEST_CASE("what a rank says itself counts more than what others see, whichever comes first") {
  for (const bool seen_first : {true, false}) {
    Desk desk;
    desk.begin();
    if (seen_first) desk.answer(1, "its process exists", false);
    desk.answer(1, "alive");
    if (!seen_first) desk.answer(1, "its process exists", false);
    CHECK(mentions(desk.report(), "rank 1 (pid 101): alive\n"));
  }
}

TEST_CASE("answers to an earlier inquiry, or of ranks that were not asked, are dropped") {
  Desk desk;
  desk.answer(1, "before any inquiry");
  desk.begin();
  desk.answer(1, "late", true, 0);
  desk.answer(2, "a stranger");
  desk.now += seconds(2);
  const std::string report = desk.report();
  CHECK(!mentions(report, "late"));
  CHECK(!mentions(report, "stranger"));
  CHECK(!mentions(report, "before"));
}

TEST_CASE("what was resolved meanwhile is not reported") {
  Desk desk;
  desk.begin();
  desk.waiting.clear();
  CHECK(desk.report() == "");
  CHECK(!desk.inspector.is_asking());
}

TEST_CASE("the next report is due after the time of warning") {
  Desk desk;
  desk.begin();
  CHECK(desk.report() != "");
  CHECK(!desk.begin());
  desk.now += seconds(60);
  const auto inquiry = desk.begin();
  REQUIRE(inquiry);
  CHECK(inquiry->number == 2);
}

TEST_CASE("a stall beyond the time of shutdown is fatal, though a report was just made") {
  Desk desk({seconds(60), seconds(90), seconds(2)});
  desk.begin();
  CHECK(!desk.inspector.finish(desk.waiting, desk.now)->fatal);
  desk.waiting = {stalled("x", 91, {0}, {1})};
  REQUIRE(desk.begin());
  const auto report = desk.inspector.finish(desk.waiting, desk.now);
  REQUIRE(report);
  CHECK(report->fatal);
  CHECK(report->text.rfind("stalled for too long: ", 0) == 0);
}

TEST_CASE("a report ends with what the program has remarked") {
  Desk desk;
  desk.begin();
  const auto report = desk.inspector.finish(desk.waiting, desk.now, "rank 1 is slow\nand so is 2");
  REQUIRE(report);
  CHECK(report->text.ends_with("\n  rank 1 is slow\n  and so is 2"));
}

TEST_CASE("the limit is the first of the times that are set") {
  CHECK(!Desk({seconds(0), seconds(0), seconds(2)}).inspector.limit());
  CHECK(Desk({seconds(60), seconds(0), seconds(2)}).inspector.limit() == seconds(60));
  CHECK(Desk({seconds(0), seconds(90), seconds(2)}).inspector.limit() == seconds(90));
  CHECK(Desk({seconds(60), seconds(30), seconds(2)}).inspector.limit() == seconds(30));
}

TEST_CASE(
    "many operations are reported by absent ranks, ten names in full and the number of the rest") {
  std::vector<Stalled> waiting;
  const std::string long_name(3000, 'n');
  for (int i = 0; i < 25; ++i)
    waiting.push_back(stalled(long_name + std::to_string(i), 9, {0}, {1}));
  waiting.push_back(stalled("other", 8, {1}, {0}));
  const std::string text = text_of_stalled(waiting);
  CHECK(mentions(text, "\n  rank 0 waits for rank 1 in 25 operations:\n    '" + long_name + "0'"));
  CHECK(mentions(text, "'" + long_name + "9', for 9 s\n    and 15 more\n"));
  CHECK(!mentions(text, long_name + "10"));
  CHECK(mentions(text, "\n  rank 1 waits for rank 0 in 1 operation:\n    'other', for 8 s"));
}

TEST_CASE(
    "no more ranks are asked than an inquiry holds, and the others are reported as not asked") {
  Desk desk;
  std::vector<int> absent(kRanksAskedMax + 2);
  for (std::size_t i = 0; i < absent.size(); ++i) absent[i] = static_cast<int>(i) + 1;
  desk.waiting = {stalled("x", 61, {0}, absent)};
  CHECK(desk.begin()->ranks.size() == kRanksAskedMax);
  CHECK(mentions(desk.report(), "ranks 257, 258 (pid 357; pid 358): not queried"));
}

TEST_CASE("a text is clipped between characters, and says by how much") {
  CHECK(clipped("short", 100) == "short");
  std::string text;
  for (int i = 0; i < 100; ++i) text += "\xc3\xa4";
  for (std::size_t bytes_max = 100; bytes_max < 104; ++bytes_max) {
    const std::string cut = clipped(text, bytes_max);
    CHECK(cut.size() <= bytes_max);
    const std::size_t kept = cut.find('\n');
    CHECK(kept % 2 == 0);
    CHECK(cut.substr(kept) == "\n... (" + std::to_string(text.size() - kept) + " more bytes)");
  }
}

}  // namespace
}  // namespace polyhvd
