// Processes that the spawner starts: their descriptors, their ends, and that nothing of them stays.
#include "pool/spawner.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <boost/test/unit_test.hpp>

namespace mctl {
namespace {

struct Ended {
  int status = -2;
  pid_t pid = -1;
};

// A spawner, and one process of it with both of its descriptors.
class Case {
 public:
  Spawner::Id start(const std::string& script) { return run({"sh", "-c", script}); }

  Spawner::Id run(const std::vector<std::string>& words) {
    std::array<int, 2> channel, log;
    BOOST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel.data()) == 0);
    BOOST_REQUIRE(pipe2(log.data(), O_CLOEXEC) == 0);
    channel_ = Descriptor(channel[0]);
    log_ = Descriptor(log[0]);
    const Descriptor other_channel(channel[1]), other_log(log[1]);
    Spawner::Events events;
    events.started = [this](pid_t pid) { ended.pid = pid; };
    events.ended = [this](int status, double) { ended.status = status; };
    const auto id = spawner_->start(words, other_channel.get(), other_log.get(), std::move(events));
    BOOST_REQUIRE(id);
    return *id;
  }

  template <class Condition>
  void run_until(Condition condition) {
    while (!condition()) io_.run_one();
  }
  void run_to_its_end() {
    run_until([this] { return ended.status != -2; });
  }

  // What comes until there is nobody left who could write.
  std::string all_of(bool channel) {
    std::string text;
    char bytes[256];
    ssize_t count;
    while ((count = read((channel ? channel_ : log_).get(), bytes, sizeof bytes)) > 0) text.append(bytes, count);
    return text;
  }

  std::string line() {
    std::string text;
    for (char c; read(channel_.get(), &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }

  Spawner& spawner() { return *spawner_; }
  void end_spawner() { spawner_.reset(); }
  Ended ended;

 private:
  boost::asio::io_context io_;
  std::unique_ptr<Spawner> spawner_ = std::make_unique<Spawner>(io_, *fork_spawner());
  Descriptor channel_, log_;
};

BOOST_AUTO_TEST_CASE(spawner_gives_a_process_its_channel_and_its_log) {
  Case one;
  one.start("echo to the log; echo too >&2; echo $MCTL_HANDLER_FD >&3; cat; exit 7");
  one.run_to_its_end();
  BOOST_TEST(WEXITSTATUS(one.ended.status) == 7);
  BOOST_TEST(one.all_of(false) == "to the log\ntoo\n");
  BOOST_TEST(one.all_of(true) == "3\n");
}

BOOST_AUTO_TEST_CASE(spawner_passes_on_no_other_descriptor) {
  Case one;
  one.start("exec ls /proc/self/fd");
  one.run_to_its_end();
  BOOST_TEST(one.all_of(false) == "0\n1\n2\n3\n4\n");  // 4 is the folder that ls reads
}

BOOST_AUTO_TEST_CASE(spawner_says_why_a_program_cannot_be_run) {
  Case one;
  one.run({"there-is-no-such-program", "a"});
  one.run_to_its_end();
  BOOST_TEST(WEXITSTATUS(one.ended.status) == 127);
  BOOST_TEST(one.all_of(false) == "cannot run `there-is-no-such-program`: No such file or directory\n");
}

BOOST_AUTO_TEST_CASE(spawner_kills_a_process_with_all_that_it_started) {
  Case one;
  const auto id = one.start("sleep 1000 & echo ready >&3; sleep 1000");
  one.run_until([&] { return one.ended.pid > 0; });
  one.spawner().kill(id);
  one.run_to_its_end();
  BOOST_TEST(WTERMSIG(one.ended.status) == SIGKILL);
  one.all_of(false);  // ends only when the last of the group is gone
}

BOOST_AUTO_TEST_CASE(spawner_ends_what_a_process_leaves_behind) {
  Case one;
  one.start("sleep 1000 & exit 0");
  one.run_to_its_end();
  BOOST_TEST(one.ended.status == 0);
  one.all_of(false);
}

BOOST_AUTO_TEST_CASE(spawner_sends_signals_to_the_process_alone) {
  Case one;
  const auto id = one.start("trap 'exit 9' USR1; echo ready >&3; while :; do sleep 0.01; done");
  one.run_until([&] { return one.ended.pid > 0; });
  BOOST_REQUIRE(one.line() == "ready");  // it has its trap
  one.spawner().signal(id, SIGUSR1);
  one.run_to_its_end();
  BOOST_TEST(WEXITSTATUS(one.ended.status) == 9);
}

BOOST_AUTO_TEST_CASE(spawner_takes_all_with_it_when_it_ends) {
  Case one;
  one.start("sleep 1000 & sleep 1000");
  one.run_until([&] { return one.ended.pid > 0; });
  one.end_spawner();
  one.all_of(false);
}

BOOST_AUTO_TEST_CASE(spawner_that_was_killed_is_told_of_and_takes_its_processes_with_it) {
  Case one;
  one.start("exec sleep 1000");
  one.run_until([&] { return one.ended.pid > 0; });
  const pid_t spawner = one.spawner().pid();
  BOOST_REQUIRE(::kill(spawner, SIGKILL) == 0);
  one.run_to_its_end();
  BOOST_TEST(one.ended.status == -1);
  one.all_of(false);
  const auto refused = one.spawner().start({"true"}, 0, 0, {});
  BOOST_REQUIRE(!refused);
  BOOST_TEST(refused.error().text.find("start the server anew") != std::string::npos);
}

}  // namespace
}  // namespace mctl
