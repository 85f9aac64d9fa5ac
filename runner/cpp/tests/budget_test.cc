// What clients may hold, and which connection goes when there are too many.
#include "doors/budget.h"

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <vector>

#include "doors/seats.h"
#include "pool/memory.h"

namespace mctl {
namespace {

BOOST_AUTO_TEST_CASE(budget_limits) {
  Budget budget(1000);
  Budget::Holding one(budget, 1), again(budget, 1), other(budget, 2), stranger(budget, 3);
  BOOST_TEST(one.set(400, true));
  BOOST_TEST(!again.set(101, true));  // half of it is the most of one client
  BOOST_TEST(again.set(100, true));
  BOOST_TEST(!stranger.set(126, false));  // an eighth
  BOOST_TEST(stranger.set(125, false));
  BOOST_TEST(!other.set(1, false));
  BOOST_TEST(!other.set(376, true));
  BOOST_TEST(other.set(375, true));
  BOOST_TEST(budget.held() == 1000u);
  BOOST_TEST(other.set(374, true));  // less always goes
  BOOST_TEST(!other.set(374, false));
  BOOST_TEST(stranger.set(126, true));
  stranger.clear();
  BOOST_TEST(budget.held() == 874u);
}

BOOST_AUTO_TEST_CASE(budget_adds_up_whatever_comes) {
  std::mt19937 random(7);
  Budget budget(1 << 20);
  std::vector<std::unique_ptr<Budget::Holding>> all;
  std::map<const Budget::Holding*, std::pair<std::uint64_t, bool>> kinds;
  for (std::uint64_t i = 0; i < 30; ++i) {
    all.push_back(std::make_unique<Budget::Holding>(budget, i % 7));
    kinds[all.back().get()] = {i % 7, true};
  }
  for (int i = 0; i < 20'000; ++i) {
    auto& holding = *all[random() % all.size()];
    const std::size_t before = holding.bytes(), bytes = random() % (1 << (random() % 20));
    const bool known = random() % 2 == 0;
    if (!holding.set(bytes, known)) {
      BOOST_TEST(holding.bytes() == before);
    } else {
      kinds[&holding].second = known;
    }
    std::size_t sum = 0, strange = 0;
    std::map<std::uint64_t, std::size_t> clients;
    for (const auto& [each, kind] : kinds) {
      sum += each->bytes();
      clients[kind.first] += each->bytes();
      if (!kind.second) strange += each->bytes();
    }
    BOOST_REQUIRE(sum == budget.held());
    BOOST_REQUIRE(sum <= budget.limit());
    BOOST_REQUIRE(strange <= budget.limit() / 8);
    for (const auto& [client, bytes_held] : clients) BOOST_REQUIRE(bytes_held <= budget.most_of_one());
  }
  all.clear();
  BOOST_TEST(budget.held() == 0u);
}

Connection* number(std::uintptr_t value) { return reinterpret_cast<Connection*>(value); }  // never looked into

BOOST_AUTO_TEST_CASE(seats_go_from_those_who_have_most) {
  using Phase = Seats::Phase;
  Seats seats;
  Seats::Seat* const first = seats.take(1, number(11));
  Seats::Seat* const second = seats.take(1, number(12));
  Seats::Seat* const third = seats.take(1, number(13));
  Seats::Seat* const good = seats.take(2, number(21));
  BOOST_TEST(seats.taken() == 4u);
  BOOST_TEST(seats.yields_to(3) == number(11));  // idle for the longest, of the largest client
  Seats::rest(first);
  BOOST_TEST(seats.yields_to(3) == number(12));
  BOOST_TEST(seats.yields_to(1) == number(12));  // its own
  second->phase = third->phase = Phase::answered;
  BOOST_TEST(seats.yields_to(3) == number(11));
  first->phase = Phase::unfinished;
  BOOST_TEST(seats.yields_to(3) == number(11));  // of the largest client, though another has an idle one
  BOOST_TEST(seats.yields_to(1) == nullptr);     // not that of a smaller client
  first->phase = Phase::answered;
  BOOST_TEST(seats.yields_to(3) == number(21));
  good->phase = Phase::unfinished;
  BOOST_TEST(seats.yields_to(3) == nullptr);
  seats.leave(second);
  seats.leave(first);
  third->phase = Phase::unfinished;
  BOOST_TEST(seats.yields_to(3) == nullptr);  // they would change places
  seats.leave(third);
  seats.leave(good);
  BOOST_TEST(seats.taken() == 0u);
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// As Linux documents the files: admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, cgroups(7).
BOOST_AUTO_TEST_CASE(memory_heeds_cgroups) {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("memory-test-" + std::to_string(std::random_device{}()));
  const auto allowed = [&] { return memory_allowed(root.string()); };
  const std::size_t machine = memory_allowed("/there/is/no/such/folder");
  const fs::path groups = root / "sys/fs/cgroup";
  write(root / "proc/self/cgroup", "0::/a/b\n");
  BOOST_TEST(allowed() == machine);
  write(groups / "a/b/memory.max", "max\n");
  BOOST_TEST(allowed() == machine);
  write(groups / "a/memory.max", "50000000\n");  // of the group that it lies in
  BOOST_TEST(allowed() == 50'000'000u);
  write(groups / "memory.max", "40000000\n");  // a container's own, mounted as the root
  BOOST_TEST(allowed() == 40'000'000u);
  write(root / "proc/self/cgroup", "5:cpu,memory:/docker/x\n4:cpuset:/\n0::/\n");  // both versions
  write(groups / "memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n");
  BOOST_TEST(allowed() == 40'000'000u);
  write(groups / "memory/memory.limit_in_bytes", "30000000\n");
  BOOST_TEST(allowed() == 30'000'000u);
  fs::remove_all(root);
}

BOOST_AUTO_TEST_CASE(memory_that_is_left) {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("memory-test-" + std::to_string(std::random_device{}()));
  const fs::path group = root / "sys/fs/cgroup/a", legacy = root / "sys/fs/cgroup/memory/b";
  const auto left = [&] { return memory_free(root.string()); };  // of a machine as these files describe it
  BOOST_TEST(!left());
  write(root / "proc/meminfo", "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n");
  BOOST_TEST(left().value() == 1'024'000u);
  write(root / "proc/self/cgroup", "5:memory:/b\n0::/a\n");
  write(group / "memory.current", "700000\n");
  BOOST_TEST(left().value() == 1'024'000u);  // without a limit
  write(group / "memory.max", "800000\n");
  BOOST_TEST(left().value() == 100'000u);
  write(group / "memory.stat", "anon 500000\nfile 200000\ninactive_file 50000\nactive_file 150000\n");
  BOOST_TEST(left().value() == 150'000u);
  write(group / "memory.current", "900000\n");  // over the limit, for a moment
  BOOST_TEST(left().value() == 0u);
  write(group / "memory.max", "max\n");
  write(legacy / "memory.limit_in_bytes", "600000\n");
  write(legacy / "memory.usage_in_bytes", "500000\n");
  write(legacy / "memory.stat", "inactive_file 1\ntotal_inactive_file 300000\n");
  BOOST_TEST(left().value() == 400'000u);
  fs::remove_all(root);
}

}  // namespace
}  // namespace mctl
