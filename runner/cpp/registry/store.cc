#include "registry/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "format/text.h"

namespace mctl {
namespace {

// A descriptor that is closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

Error failure(Code code, std::string_view what, const std::string& path, int error) {
  return {code, std::string(what) + " `" + printable(path) + "`: " + std::strerror(error)};
}

Descriptor opened(const std::string& path, int flags) {
  return Descriptor(::open(path.c_str(), flags | O_CLOEXEC, 0644));
}

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

bool sync_folder(const std::string& path) {
  const Descriptor folder = opened(folder_of(path), O_RDONLY | O_DIRECTORY);
  return folder.valid() && ::fsync(folder.get()) == 0;
}

// Whole and on the disk, or errno says why not.
bool write_file(const std::string& path, std::string_view bytes) {
  const Descriptor file = opened(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  return file.valid() && write_all(file.get(), bytes) && ::fsync(file.get()) == 0;
}

// By way of a file beside it: 0, or errno and everything is as it was.
int put_in_place(const std::string& path, std::string_view bytes) {
  const std::string fresh = path + ".new";
  if (!write_file(fresh, bytes)) {
    const int error = errno;
    ::unlink(fresh.c_str());
    return error;
  }
  return ::rename(fresh.c_str(), path.c_str()) == 0 && sync_folder(path) ? 0 : errno;
}

Result<std::string> read_file(const std::string& path, int descriptor) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return failure(Code::usage, "cannot read", path, errno);
  if (!S_ISREG(status.st_mode)) return Error{Code::usage, "`" + printable(path) + "` is no file"};
  if (status.st_size > static_cast<off_t>(kMaxState))
    return Error{Code::usage, "`" + printable(path) + "` is too large for a state"};
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t have = 0;
  while (have < text.size()) {
    const ssize_t read = ::read(descriptor, text.data() + have, text.size() - have);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return failure(Code::usage, "cannot read", path, errno);
    if (read == 0) break;
    have += static_cast<std::size_t>(read);
  }
  text.resize(have);
  return text;
}

}  // namespace

StateStore::StateStore(StateStore&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

StateStore::~StateStore() {
  if (lock_ >= 0) ::close(lock_);
}

Result<StateStore> StateStore::open(std::string path) {
  const std::string lock_path = path + ".lock";
  Descriptor lock = opened(lock_path, O_RDWR | O_CREAT | O_NOFOLLOW);
  if (!lock.valid()) return failure(Code::usage, "cannot write beside the state file", lock_path, errno);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return StateStore(std::move(path), lock.release());
  if (errno != EWOULDBLOCK) return failure(Code::usage, "cannot lock", lock_path, errno);
  return Error{Code::usage, "another server has the state file `" + printable(path) + "`: give each its own `--state`"};
}

Result<std::optional<DesiredState>> StateStore::read() const {
  const Descriptor file = opened(path_, O_RDONLY | O_NONBLOCK);
  if (!file.valid() && errno == ENOENT) return std::optional<DesiredState>();
  if (!file.valid()) return failure(Code::usage, "cannot read", path_, errno);
  const auto text = read_file(path_, file.get());
  if (!text) return text.error();
  auto state = parse_state(*text);
  if (!state) return Error{Code::usage, "`" + printable(path_) + "`, " + state.error().text};
  return std::optional(*std::move(state));
}

Status write_whole_file(const std::string& path, std::string_view bytes) {
  const int error = put_in_place(path, bytes);
  return error == 0 ? Status(Done{}) : failure(Code::unavailable, "cannot write", path, error);
}

Status StateStore::write(std::string_view printed) {
  const int error = put_in_place(path_, printed);
  if (error == 0) return Done{};
  return failure(Code::unavailable, "nothing has changed, since the state cannot be written to", path_, error);
}

}  // namespace mctl
