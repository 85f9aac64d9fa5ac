// Seccomp: rules about system calls, and the program of them that the kernel runs before each call.
#pragma once

#include <linux/filter.h>

#include <cstdint>
#include <span>
#include <vector>

#include "format/result.h"

namespace mctl {

// Refuses a call (EPERM): always, or by the lower 32 bits of one argument, which are all that the kernel takes of those
// that are named here. A call may have several rules; one is enough to refuse it.
struct Rule {
  enum When { always, is, is_not, has_bits, lacks_bits };

  std::uint32_t call;
  When when = always;
  std::uint32_t argument = 0;
  std::vector<std::uint32_t> values = {};  // is, is_not: any of them; bits: one mask
};

struct Profile {
  std::vector<Rule> refused;
  std::vector<std::uint32_t> permitted =
      {};                   // unless a rule refuses it; all others are refused. Empty: all are permitted
  bool known_only = false;  // calls that are newer than kLastCall do not exist (ENOSYS)
};

// The newest number that somebody has decided about. The numbers from 424 on are the same on all architectures.
constexpr std::uint32_t kLastCall = 471;

std::vector<sock_filter> program_of(const Profile& profile);

// For all threads, for good. Code::host where the kernel has no seccomp, or forbids it.
Status install(const std::vector<sock_filter>& program);

}  // namespace mctl
