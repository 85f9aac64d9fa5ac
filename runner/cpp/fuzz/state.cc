// Text as a state file, as a change of a state, and as serve.toml: refused with one line, or sound ever after.
#include <cstdint>

#include "check.h"
#include "format/json.h"
#include "registry/change.h"
#include "registry/reconcile.h"
#include "registry/serve_toml.h"
#include "registry/traffic.h"

namespace mctl {
namespace {

const DesiredState& sample() {
  static const DesiredState state = *completed(*parse_state(R"({"schema":"mctl.state/1","models":{
    "m":{"versions":{"1":{"bundle":"a"},"2":{"bundle":"b"},"3":{"bundle":"c"}},"labels":{"stable":"1"}},
    "r":{"versions":{"1":{"bundle":"a"},"2":{"bundle":"b"}},"rollout":{"version":"2"}}},"aliases":{"o/m":"m"}})"));
  return state;
}

void one_line(const Error& error) {
  require(!error.text.empty() && error.text.find('\n') == std::string::npos, "a refusal is one line");
}

void sound(const DesiredState& state) {
  const auto again = parse_state(print_state(state));
  require(again && *again == state, "it reads the same when it is printed");
  for (const auto& [name, model] : state.models) {
    std::int64_t sum = 0;
    for (const Share& share : shares_of(model, [](const std::string&) { return true; })) sum += share.percent;
    require(sum == (model.versions.empty() ? 0 : 100), "all shares together are everything");
  }
  const auto settings_of = [&](const std::string& model, const std::string& version) {
    return resolved({&state.models.at(model).versions.at(version).settings, &state.models.at(model).settings});
  };
  for (const Step& step : next_steps(state, {}, settings_of))
    require(step.kind == Step::Kind::load, "an empty server only loads");
}

void read(std::string_view text) {
  if (const auto state = parse_state(text)) {
    sound(*state);
    if (const auto whole = completed(*state)) sound(*whole);
  } else {
    one_line(state.error());
  }
  const auto patch = parse_json(text);
  for (const Owner owner : {Owner::state, Owner::folder}) {
    if (!patch) break;
    const auto after = changed(sample(), *patch, owner);
    after ? sound(*after) : one_line(after.error());
  }
  if (const auto settings = parse_serve_toml(text); !settings) one_line(settings.error());
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::read({reinterpret_cast<const char*>(data), size});
  return 0;
}
