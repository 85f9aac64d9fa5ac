// The state file (`--state FILE`): the last state that was acknowledged, over a kill -9, a full disk or a power cut.
//
// A write goes to FILE.new, is fsynced, renamed over FILE, and the folder is fsynced; only then may the change be
// acknowledged. So FILE always holds one whole state: the last that was acknowledged, or the one that was being
// written. One server at a time owns the file, by a lock on FILE.lock that ends with its process.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "registry/state.h"

namespace mctl {

// The same way for any file. Code::unavailable.
Status write_whole_file(const std::string& path, std::string_view bytes);

class StateStore {
 public:
  // Takes the lock. Code::usage: another process has it, or the folder cannot be written.
  static Result<StateStore> open(std::string path);

  StateStore(StateStore&& other) noexcept;
  StateStore& operator=(StateStore&&) = delete;
  ~StateStore();

  // nullopt: there is no file yet. Code::usage says what is wrong with it, with the line.
  Result<std::optional<DesiredState>> read() const;

  // `printed` is print_state's. Code::unavailable: it could not be kept, and the change has to be refused. The file is
  // as it was (only if the folder alone could not be synced, it is the new one until the next write).
  Status write(std::string_view printed);

 private:
  StateStore(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  std::string path_;
  int lock_;  // descriptor of FILE.lock
};

}  // namespace mctl
