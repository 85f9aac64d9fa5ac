#include "model/host.h"

#include <boost/test/unit_test.hpp>

#include "small_bundle.h"
#include "support.h"

namespace mctl {
namespace {

Manifest manifest() { return *parse_manifest(small_members().back().second); }

const Host kHost{"linux", "x86_64", "2.36", {"avx", "avx2", "fma"}};

BOOST_AUTO_TEST_SUITE(host_)

BOOST_AUTO_TEST_CASE(versions_are_compared_by_numbers) {
  BOOST_TEST(older("2.9", "2.36"));
  BOOST_TEST(older("3.4", "3.4.30"));
  BOOST_TEST(older("", "2.17"));
  BOOST_TEST(!older("2.36", "2.36"));
  BOOST_TEST(!older("3.4.30", "3.4.9"));
}

BOOST_AUTO_TEST_CASE(a_host_that_runs_it) {
  BOOST_TEST(why(check_host(manifest(), kHost)).empty());
  Manifest more = manifest();
  more.target.features = {"avx2", "fma"};
  BOOST_TEST(why(check_host(more, kHost)).empty());
}

BOOST_AUTO_TEST_CASE(hosts_that_do_not) {
  const std::string cannot = "this machine cannot run the bundle: ";
  Manifest other = manifest();
  other.target.arch = "aarch64";
  BOOST_TEST(why(check_host(other, kHost)) == cannot +
                                                  "it is for linux aarch64 cpu, this is linux x86_64 cpu; compile "
                                                  "the program on a machine like this one");
  other = manifest();
  other.target.device = "cuda";
  BOOST_TEST(!why(check_host(other, kHost)).empty());
  other = manifest();
  other.target.glibc = "2.38";
  BOOST_TEST(why(check_host(other, kHost)) == cannot +
                                                  "it needs glibc 2.38 or newer, this machine has 2.36; compile the "
                                                  "program on a machine like this one");
  other = manifest();
  other.target.isa = "x86-64-v4";
  other.target.features = {"avx2", "avx512f"};
  const auto verdict = check_host(other, kHost);
  BOOST_TEST(why(verdict) == cannot +
                                 "it is compiled for x86-64-v4, and this CPU has no `avx512f`; compile the program "
                                 "again with `--target native`");
  BOOST_TEST((verdict.error().code == Code::host));
}

BOOST_AUTO_TEST_CASE(this_machine) {
  const Host host = this_host();
  BOOST_TEST(host.os == "linux");
  BOOST_TEST(!host.arch.empty());
  BOOST_TEST(!older(host.glibc, "2.17"));
  BOOST_TEST(host.features.size() > 3u);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
