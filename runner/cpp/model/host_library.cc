#include "model/host_library.h"

#include <dlfcn.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>

#include "model/code.h"
#include "model/dl.h"

namespace mctl {
namespace {

constexpr auto kShim = "libmctl_shim.so";
constexpr auto kLibtorch = "libtorch_cpu.so";

Error host(std::string text) { return {Code::host, std::move(text)}; }

// dlopen() does not say why memory could not be had.
std::string cause_of(std::string text) {
  if (text.find("failed to map segment") == std::string::npos) return text;
  return text + "; is there a limit of memory (`ulimit -v`), or is the folder mounted `noexec`?";
}

// What OpenMP and MKL start with: later calls do not reach all of it. Idle OpenMP threads spin for about 0.1 ms, from
// one layer to the next: with a third of that MiniLM takes up to 1.09 times as long, with three times that 0.95. But
// where cores are shared, as with the front, spinning takes the time of the thread that they wait for: with three times
// that a busy server of two threads on two cores gives 0.85 of the answers, without an end a quarter.
void set_environment(int threads) {
  const std::string number = std::to_string(threads);
  setenv("OMP_NUM_THREADS", number.c_str(), 1);
  setenv("MKL_NUM_THREADS", number.c_str(), 1);
  if (getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "3000", 0);
}

// What a call asks for and gives back stays with the process, for the next call. Otherwise the kernel gets it back, and
// hands it out again page by page: with two threads that took a fifth of a CNN's time at 8 rows.
void keep_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that there may be
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// The folder of this program.
std::string own_folder() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  const std::string file(path, size > 0 ? static_cast<std::size_t>(size) : 0);
  return file.substr(0, file.rfind('/') + 1);
}

std::string file_of(const std::string& path) {
  struct stat status;
  if (path.empty()) return own_folder() + kShim;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) ? path + "/" + kLibtorch : path;
}

}  // namespace

Result<HostLibrary> HostLibrary::load(const std::string& path, int threads) {
  set_environment(threads);
  keep_memory();
  HostLibrary library;
  const std::string file = file_of(path);
  library.folder_ = file.substr(0, file.rfind('/') + 1);
  library.handle_ = dlopen(file.c_str(), RTLD_LAZY | RTLD_GLOBAL);
  if (library.handle_ == nullptr)
    return host("cannot load " + std::string(path.empty() ? "mctl's shim" : "libtorch") + ": " + cause_of(dl_error()));
  const char* (*shim)() = nullptr;
  library.is_shim_ = find_symbol(library.handle_, "mctl_shim_abi", shim);
  if (auto found = library.look_up(); !found) return found.error();
  library.set_threads(threads);
  return library;
}

std::string HostLibrary::libtorch_beside() {
  const std::string path = own_folder() + kLibtorch;
  return access(path.c_str(), R_OK) == 0 ? path : "";
}

Status HostLibrary::look_up() {
  std::int32_t (*cpu)() = nullptr;
  const bool found = find_symbol(handle_, "aoti_torch_create_tensor_from_blob", calls_.create) &&
                     find_symbol(handle_, "aoti_torch_delete_tensor_object", calls_.remove) &&
                     find_symbol(handle_, "aoti_torch_get_data_ptr", calls_.data) &&
                     find_symbol(handle_, "aoti_torch_get_dim", calls_.rank) &&
                     find_symbol(handle_, "aoti_torch_get_sizes", calls_.sizes) &&
                     find_symbol(handle_, "aoti_torch_get_strides", calls_.strides) &&
                     find_symbol(handle_, "aoti_torch_get_dtype", calls_.dtype) &&
                     find_symbol(handle_, "torch_exception_get_what_without_backtrace", calls_.what) &&
                     find_symbol(handle_, "aoti_torch_device_type_cpu", cpu);
  if (!found) return host(std::string(name()) + " lacks what the runner needs: " + dl_error());
  cpu_ = cpu();
  for (std::size_t i = 0; i < dtypes_.size(); ++i) {
    std::int32_t (*number)() = nullptr;
    const std::string symbol = "aoti_torch_dtype_" + std::string(name_of(static_cast<Dtype>(i)));
    if (!find_symbol(handle_, symbol.c_str(), number)) return host(std::string(name()) + " lacks `" + symbol + "`");
    dtypes_[i] = number();
  }
  find_symbol(handle_, "omp_set_num_threads", calls_.set_omp_threads);
  return Done{};
}

// Of operators that are called by their names, libtorch has no list in C; the shim has none.
bool HostLibrary::has(const std::string& import) const {
  if (import.find("::") != std::string::npos) return !is_shim_;
  return dlsym(handle_, import.c_str()) != nullptr;
}

// Such libraries are linked to `libtorch.so`, an empty one that names libtorch_cpu and, in builds for a GPU, CUDA's:
// only what needs it gets it.
Status HostLibrary::load_operators(const std::string& name, const UnnamedFile& code) const {
  if (is_shim_) return host("`" + name + "` has operators for libtorch: name it with `--libtorch`");
  auto loaded = load_code(code);
  if (!loaded && loaded.error().text.find("libtorch.so") != std::string::npos &&
      dlopen((folder_ + "libtorch.so").c_str(), RTLD_LAZY | RTLD_GLOBAL) != nullptr)
    loaded = load_code(code);
  if (!loaded) return host("cannot load `" + name + "`: " + loaded.error().text);
  return Done{};
}

void HostLibrary::set_threads(int threads) const {
  if (calls_.set_omp_threads != nullptr) calls_.set_omp_threads(threads);
}

std::string HostLibrary::last_error() const {
  const char* text = calls_.what();
  return text != nullptr ? text : "";
}

Result<AtenTensor> HostLibrary::tensor(void* data, Dtype dtype, std::span<const std::int64_t> sizes,
                                       std::span<const std::int64_t> strides) const {
  AtenTensor tensor = nullptr;
  const auto number = dtypes_[static_cast<std::size_t>(dtype)];
  if (calls_.create(data, static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), 0, number, cpu_, 0,
                    &tensor) != 0)
    return Error{Code::internal, std::string(name()) + " made no tensor: " + first_line(last_error())};
  return tensor;
}

}  // namespace mctl
