#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "observe/mailbox.h"

namespace polyhvd {
namespace {

TEST_CASE("lines come out in order, the last ones after close") {
  Mailbox mailbox;
  mailbox.log("a");
  mailbox.log("b");
  mailbox.close();
  CHECK(mailbox.wait());
  CHECK(mailbox.take_line()->text == "a");
  CHECK(mailbox.wait());
  CHECK(mailbox.take_line()->text == "b");
  CHECK(!mailbox.wait());
  CHECK(!mailbox.take_line());
}

TEST_CASE("a remark stays until there is another") {
  Mailbox mailbox;
  CHECK(mailbox.remarked() == "");
  mailbox.remark("a");
  CHECK(mailbox.remarked() == "a");
  CHECK(mailbox.remarked() == "a");
  mailbox.remark("");
  CHECK(mailbox.remarked() == "");
}

TEST_CASE("a question is taken once, and its answer once") {
  Mailbox mailbox;
  int requests = 0;
  mailbox.set_on_stacks([&] { ++requests; });
  CHECK(!mailbox.take_question());
  mailbox.ask_stacks();
  CHECK(mailbox.wait());
  CHECK(mailbox.take_question());
  CHECK(!mailbox.take_question());
  CHECK(!mailbox.take_stacks());
  mailbox.answer("here");
  CHECK(requests == 1);
  CHECK(mailbox.take_stacks() == "here");
  CHECK(!mailbox.take_stacks());
}

TEST_CASE("a new question makes an old answer void") {
  Mailbox mailbox;
  mailbox.answer("old");
  mailbox.ask_stacks();
  CHECK(!mailbox.take_stacks());
}

TEST_CASE("close ends a wait, questions or not") {
  Mailbox mailbox;
  std::atomic<int> taken{0};
  std::thread attendant([&] {
    while (mailbox.wait()) {
      if (mailbox.take_line()) ++taken;
    }
  });
  mailbox.log("a");
  while (taken == 0) std::this_thread::yield();
  mailbox.ask_stacks();
  mailbox.close();
  attendant.join();
  CHECK(taken == 1);
}

}  // namespace
}  // namespace polyhvd
