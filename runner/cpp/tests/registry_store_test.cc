// The state file: whole after any kill, one writer, and words for what is wrong with it.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <random>

#include "registry/store.h"
#include "support.h"

namespace mctl {
namespace {

namespace fs = std::filesystem;

struct Folder {
  fs::path path = fs::temp_directory_path() / ("mctl-store-" + std::to_string(::getpid()));
  Folder() { fs::create_directory(path); }
  ~Folder() { fs::remove_all(path); }
  std::string file(const char* name = "state.json") const { return path / name; }
  void put(std::string_view text) const { std::ofstream(file()) << text; }
};

// The k-th state that the writer writes; long enough to be written in more than one page.
DesiredState numbered(std::int64_t k) {
  DesiredState state;
  for (int i = 0; i < 40; ++i) {
    ModelState& model = state.models["model-" + std::to_string(i)];
    model.versions["1"].bundle = std::string(200, 'b');
    model.settings.max_queue_size = k;
  }
  return state;
}

std::int64_t number_of(const DesiredState& state) {
  BOOST_REQUIRE(state.models.size() == 40u);
  const std::int64_t number = *state.models.begin()->second.settings.max_queue_size;
  BOOST_REQUIRE(state == numbered(number));  // whole
  return number;
}

// Writes states from `first` on, and acknowledges each on the pipe, until it is killed.
[[noreturn]] void write_on(const std::string& path, std::int64_t first, int acknowledge) {
  auto store = StateStore::open(path);
  for (std::int64_t k = first; store; ++k)
    if (!store->write(print_state(numbered(k))) || ::write(acknowledge, &k, sizeof k) != sizeof k) break;
  ::_exit(1);
}

std::int64_t last_of(int pipe) {
  std::int64_t number = 0, last = 0;
  while (::read(pipe, &number, sizeof number) == sizeof number) last = number;
  return last;
}

std::string why_not(const std::string& path) {
  const auto store = StateStore::open(path);
  if (!store) return store.error().text;
  const auto state = store->read();
  return state ? "" : state.error().text;
}

BOOST_AUTO_TEST_SUITE(registry_store)

BOOST_AUTO_TEST_CASE(killed_at_any_moment) {
  const Folder folder;
  std::mt19937 random(11);
  std::int64_t last = 0, in_flight = 0;
  for (int round = 0; round < 200; ++round) {
    int pipe[2];
    BOOST_REQUIRE(::pipe(pipe) == 0);
    const pid_t writer = ::fork();
    if (writer == 0) write_on(folder.file(), last + 1, pipe[1]);
    ::close(pipe[1]);
    std::int64_t first = 0;  // it writes by now: kill it in the midst of what follows
    if (::read(pipe[0], &first, sizeof first) == sizeof first) last = first;
    ::usleep(std::uniform_int_distribution<useconds_t>(0, 3000)(random));
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    last = std::max(last, last_of(pipe[0]));
    ::close(pipe[0]);
    auto store = StateStore::open(folder.file());  // the lock went with the writer
    BOOST_REQUIRE_MESSAGE(store, why(store));
    const auto state = store->read();
    BOOST_REQUIRE_MESSAGE(state, why(state));
    BOOST_REQUIRE(state->has_value());
    const std::int64_t number = number_of(**state);
    BOOST_REQUIRE_MESSAGE(number == last || number == last + 1, number << " after " << last);
    in_flight += number == last + 1;
    last = number;
  }
  BOOST_TEST(last >= 200);
  BOOST_TEST_MESSAGE(in_flight << " of 200 kills left the state that was in flight");
}

BOOST_AUTO_TEST_CASE(no_file_yet) {
  const Folder folder;
  auto store = StateStore::open(folder.file());
  BOOST_REQUIRE_MESSAGE(store, why(store));
  const auto none = store->read();
  BOOST_REQUIRE_MESSAGE(none, why(none));
  BOOST_TEST(!none->has_value());
  BOOST_TEST(why(store->write(print_state(numbered(5)))) == "");
  BOOST_TEST(number_of(**store->read()) == 5);
  BOOST_TEST(!fs::exists(folder.file("state.json.new")));
}

BOOST_AUTO_TEST_CASE(two_servers_on_one_file) {
  const Folder folder;
  const auto one = StateStore::open(folder.file());
  BOOST_REQUIRE(one);
  const auto other = StateStore::open(folder.file());
  BOOST_TEST_REQUIRE(!other);
  BOOST_TEST(other.error().text ==
             "another server has the state file `" + folder.file() + "`: give each its own `--state`");
}

BOOST_AUTO_TEST_CASE(a_full_disk_changes_nothing) {
  const Folder folder;
  auto store = StateStore::open(folder.file());
  BOOST_REQUIRE(store);
  BOOST_REQUIRE(store->write(print_state(numbered(1))));
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{1000, limit.rlim_max};  // as a full disk: the file is cut in the midst
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto refused = store->write(print_state(numbered(2)));
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, before);
  BOOST_TEST_REQUIRE(!refused);
  BOOST_TEST((refused.error().code == Code::unavailable));
  BOOST_TEST(refused.error().text ==
             "nothing has changed, since the state cannot be written to `" + folder.file() + "`: File too large");
  BOOST_TEST(number_of(**store->read()) == 1);
  BOOST_TEST(!fs::exists(folder.file("state.json.new")));
  BOOST_TEST(why(store->write(print_state(numbered(3)))) == "");
}

BOOST_AUTO_TEST_CASE(a_file_that_is_wrong) {
  const Folder folder;
  const std::string named = "`" + folder.file() + "`, ";
  folder.put("{\"schema\": \"mctl.state/2\",\n \"models\": {}}");
  BOOST_TEST(why_not(folder.file()) ==
             named + "line 1: schema is \"mctl.state/2\", and this mctl reads `mctl.state/1`");
  folder.put(print_state(numbered(1)).substr(0, 1000));
  BOOST_TEST(why_not(folder.file()).starts_with(named + "line "));
  BOOST_TEST(why_not(folder.file()).ends_with("the text ends too early: it was cut"));
  folder.put("");
  BOOST_TEST(why_not(folder.file()) == named + "line 1: the text ends too early: it was cut");
  fs::remove(folder.file());
  fs::create_directory(folder.file());
  BOOST_TEST(why_not(folder.file()) == "`" + folder.file() + "` is no file");
  BOOST_TEST(why_not(folder.file("nowhere/state.json")) == "cannot write beside the state file `" +
                                                               folder.file("nowhere/state.json.lock") +
                                                               "`: No such file or directory");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
