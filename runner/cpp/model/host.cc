#include "model/host.h"

#include <dlfcn.h>
#include <elf.h>
#include <gnu/libc-version.h>
#include <link.h>
#include <sys/utsname.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace mctl {
namespace {

Error cannot(const std::string& reason, const std::string& way_out) {
  return {Code::host, "this machine cannot run the bundle: " + reason + "; " + way_out};
}

constexpr auto kElsewhere = "compile the program on a machine like this one";

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 4; ++i) text += (i == 0 ? "`" : ", `") + names[i] + '`';
  return names.size() <= 4 ? text : text + " and " + std::to_string(names.size() - 4) + " more";
}

std::set<std::string, std::less<>> cpu_features() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

// Runs of digits.
std::vector<int> numbers(std::string_view version) {
  std::vector<int> found;
  const char* const end = version.data() + version.size();
  for (const char* at = version.data(); at < end;) {
    int number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error == std::errc() && *at != '-') found.push_back(number);
    at = error == std::errc() ? next : at + 1;
  }
  return found;
}

// The newest GLIBCXX_3… that the libstdc++ of this process defines: its version definitions, as the loader left them.
std::string newest_glibcxx() {
  void* library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  link_map* map = nullptr;
  if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return {};
  const auto address = [&](ElfW(Addr) value) { return value < map->l_addr ? value + map->l_addr : value; };
  ElfW(Addr) definitions = 0, names = 0;
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_VERDEF) definitions = address(entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) names = address(entry->d_un.d_ptr);
  }
  std::string newest;
  for (auto at = definitions; at != 0 && names != 0;) {
    const auto* definition = reinterpret_cast<const ElfW(Verdef)*>(at);
    const auto* name = reinterpret_cast<const ElfW(Verdaux)*>(at + definition->vd_aux);
    const std::string_view text(reinterpret_cast<const char*>(names) + name->vda_name);
    if (text.starts_with("GLIBCXX_3") && older(newest, text.substr(8))) newest = text.substr(8);
    at = definition->vd_next != 0 ? at + definition->vd_next : 0;
  }
  return newest;
}

Status check_version(const std::string& library, const std::string& needed, const std::string& here) {
  if (needed.empty() || !older(here, needed)) return Done{};
  const std::string found = here.empty() ? "this machine has none" : "this machine has " + here;
  return cannot("it needs " + library + " " + needed + " or newer, " + found, kElsewhere);
}

}  // namespace

Host this_host() {
  utsname name{};
  uname(&name);
  return {"linux", name.machine, gnu_get_libc_version(), cpu_features()};
}

bool older(std::string_view version, std::string_view than) { return numbers(version) < numbers(than); }

Status check_host(const Manifest& manifest, const Host& host) {
  const Target& target = manifest.target;
  if (target.os != host.os || target.arch != host.arch || target.device != "cpu")
    return cannot("it is for " + target.os + " " + target.arch + " " + target.device + ", this is " + host.os + " " +
                      host.arch + " cpu",
                  kElsewhere);
  if (auto glibc = check_version("glibc", target.glibc, host.glibc); !glibc) return glibc;
  std::vector<std::string> missing;
  for (const auto& feature : target.features)
    if (!host.features.contains(feature)) missing.push_back(feature);
  if (missing.empty()) return Done{};
  return cannot("it is compiled for " + target.isa + ", and this CPU has no " + listed(missing),
                "compile the program again with `--target native`");
}

Status check_libraries(const Manifest& manifest, const HostLibrary& library) {
  if (auto glibcxx = check_version("libstdc++", manifest.target.glibcxx, newest_glibcxx()); !glibcxx) return glibcxx;
  std::vector<std::string> missing;
  for (const Variant& variant : manifest.variants)
    for (const auto& symbol : variant.imports)
      if (!library.has(symbol)) missing.push_back(symbol);
  if (missing.empty()) return Done{};
  if (library.is_shim())
    return cannot("mctl's shim lacks " + listed(missing),
                  "name a libtorch with `--libtorch`, or serve it with a newer mctl");
  return cannot("the libtorch at hand lacks " + listed(missing),
                "compile the program again with this torch, or install torch " + manifest.torch);
}

}  // namespace mctl
