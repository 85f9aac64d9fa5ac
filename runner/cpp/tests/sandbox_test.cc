// What is decided about each system call of the kernel's table: tests/vectors/sandbox has a line for each.
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cerrno>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "pool/profiles.h"

namespace mctl {
namespace {

#if defined(__x86_64__)
constexpr auto kTable = VECTORS "/sandbox/x86_64.txt";
constexpr std::uint32_t kThisMachine = AUDIT_ARCH_X86_64, kAnother = AUDIT_ARCH_I386;
#else
constexpr auto kTable = VECTORS "/sandbox/aarch64.txt";
constexpr std::uint32_t kThisMachine = AUDIT_ARCH_AARCH64, kAnother = AUDIT_ARCH_ARM;
#endif
constexpr std::uint32_t kRefuse = SECCOMP_RET_ERRNO | EPERM, kAbsent = SECCOMP_RET_ERRNO | ENOSYS;

using Program = std::vector<sock_filter>;
using Arguments = std::array<std::uint32_t, 6>;

// A call as the filter sees it; arguments may be anything.
struct Call {
  std::uint32_t number, machine = kThisMachine;
  std::optional<Arguments> arguments = {};
};

bool holds(const sock_filter& step, std::uint32_t value) {
  switch (BPF_OP(step.code)) {
    case BPF_JEQ:
      return value == step.k;
    case BPF_JGE:
      return value >= step.k;
    case BPF_JGT:
      return value > step.k;
    default:
      return (value & step.k) != 0;
  }
}

// Every answer that the program can give from step `at` on; a loaded value that is not known goes both ways.
std::set<std::uint32_t> answers(const Program& program, const Call& call, std::size_t at = 0,
                                std::optional<std::uint32_t> value = {}) {
  for (;; ++at) {
    const sock_filter& step = program.at(at);
    if (BPF_CLASS(step.code) == BPF_RET) return {step.k};
    if (step.code == (BPF_LD | BPF_W | BPF_ABS)) {
      if (step.k == offsetof(seccomp_data, nr))
        value = call.number;
      else if (step.k == offsetof(seccomp_data, arch))
        value = call.machine;
      else if (call.arguments)
        value = call.arguments->at((step.k - offsetof(seccomp_data, args)) / 8);
      else
        value.reset();
    } else if (BPF_OP(step.code) == BPF_JA) {
      at += step.k;
    } else if (value) {
      at += holds(step, *value) ? step.jt : step.jf;
    } else {
      auto all = answers(program, call, at + 1 + step.jt, value);
      all.merge(answers(program, call, at + 1 + step.jf, value));
      return all;
    }
  }
}

Program program(Stage stage, bool strict = false) { return program_of(profile_of(stage, strict)); }

// In words, for a process that has gone through these stages.
std::string verdict(const std::vector<Program>& stages, const Call& call) {
  std::string word = "yes";
  for (const Program& stage : stages) {
    const auto found = answers(stage, call);
    if (found.contains(kAbsent)) return "absent";
    if (found == std::set{kRefuse}) word = "no";
    if (found.size() > 1 && word == "yes") word = "some";
  }
  return word;
}

// front, loading, ready, ready if strict
std::vector<std::vector<Program>> lives() {
  const Program front = program(Stage::front), loading = program(Stage::loading), ready = program(Stage::ready);
  return {{front}, {front, loading}, {front, loading, ready}, {front, program(Stage::loading, true), ready}};
}

BOOST_AUTO_TEST_CASE(each_system_call_of_the_kernel_is_decided_about) {
  std::ifstream table(kTable);
  std::map<std::uint32_t, std::string> decided;
  const auto stages = lives();
  for (std::string line; std::getline(table, line);) {
    if (line.empty() || line.starts_with("#")) continue;
    std::istringstream words(line);
    std::uint32_t number;
    std::string name, wanted;
    words >> number >> name;
    BOOST_REQUIRE(decided.emplace(number, name).second);
    if (kSanitized && (name == "ptrace" || name == "prctl")) continue;
    for (const auto& stage : stages) {
      words >> wanted;
      BOOST_TEST(verdict(stage, {number}) == wanted, number << " " << name << " at " << &stage - &stages[0] << ": "
                                                            << verdict(stage, {number}) << ", not " << wanted);
    }
  }
  BOOST_REQUIRE(!decided.empty());
  BOOST_TEST(decided.rbegin()->first == kLastCall);
  for (std::uint32_t number = kLastCall + 1; number < kLastCall + 100; ++number)
    for (std::size_t stage = 1; stage < stages.size(); ++stage)
      BOOST_TEST(verdict(stages[stage], {number}) == "absent");
}

BOOST_AUTO_TEST_CASE(another_numbering_of_the_calls_is_refused) {
  for (const auto& stages : lives()) {
    BOOST_TEST(verdict(stages, {0, kAnother}) == "no");
#if defined(__x86_64__)
    BOOST_TEST(verdict(stages, {0x40000000}) != "yes");
#endif
  }
}

std::string rule_of(Rule::When when, std::vector<std::uint32_t> values, std::uint32_t argument) {
  const Profile profile{{{7, when, 2, std::move(values)}}};
  const Program made = program_of(profile);
  BOOST_TEST(verdict({made}, {8}) == "yes");
  return verdict({made}, {7, kThisMachine, Arguments{1, 1, argument, 1, 1, 1}});
}

BOOST_AUTO_TEST_CASE(rules_look_at_one_argument) {
  for (const std::uint32_t value : {5u, 9u}) {
    BOOST_TEST(rule_of(Rule::is, {5, 9}, value) == "no");
    BOOST_TEST(rule_of(Rule::is_not, {5, 9}, value) == "yes");
  }
  BOOST_TEST(rule_of(Rule::is, {5, 9}, 6) == "yes");
  BOOST_TEST(rule_of(Rule::is_not, {5, 9}, 6) == "no");
  BOOST_TEST(rule_of(Rule::has_bits, {6}, 0x10) == "yes");
  BOOST_TEST(rule_of(Rule::has_bits, {6}, 0x12) == "no");
  BOOST_TEST(rule_of(Rule::lacks_bits, {6}, 0x10) == "no");
  BOOST_TEST(rule_of(Rule::lacks_bits, {6}, 0x14) == "yes");
}

}  // namespace
}  // namespace mctl
