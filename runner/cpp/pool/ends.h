// How a process ended, for a person.
#pragma once

#include <sys/wait.h>

#include <cstring>
#include <string>

namespace mctl {

// `status` as waitpid has it.
inline std::string text_of_end(int status) {
  if (WIFSIGNALED(status)) {
    return "signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
  }
  return "exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace mctl
