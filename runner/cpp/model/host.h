// Can this machine run a bundle? Compared before any of the bundle's code is mapped; mirrors bundle_format/host.py.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "format/manifest.h"
#include "format/result.h"
#include "model/host_library.h"

namespace mctl {

struct Host {
  std::string os, arch, glibc;                  // "linux", "x86_64", "2.36"
  std::set<std::string, std::less<>> features;  // of /proc/cpuinfo
};

Host this_host();

// "a.b.c" against "a.b.d", number by number.
bool older(std::string_view version, std::string_view than);

// What can be said before the host library is loaded, and after. Code::host says what is missing and what to do.
Status check_host(const Manifest& manifest, const Host& host);
Status check_libraries(const Manifest& manifest, const HostLibrary& library);

}  // namespace mctl
