#include "registry/rollout.h"

#include <cstdio>

#include "format/text.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr double kAtTheEnd = 0.05, kOnTheWay = 0.001;  // levels of rule 2
constexpr double kQuantile = 0.99;

std::string digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}
std::string percent(double rate) { return digits(100 * rate) + " %"; }

struct Look {
  bool enough = false, held = false;
  bool final() const { return enough && held; }
  double level() const { return final() ? kAtTheEnd : kOnTheWay; }
  std::string confidence() const { return final() ? "95 %" : "99.9 %"; }
};

std::int64_t seen(const Rollout& rollout, const Watched& watched) {
  return rollout.phase == RolloutPhase::shadow ? watched.compared : watched.fresh.requests;
}

Look look_at(const Rollout& rollout, const Watched& watched) {
  return {seen(rollout, watched) >= rollout.min_requests, watched.held_ms >= rollout.hold_s * 1000};
}

std::string place(const Rollout& rollout) {
  if (rollout.phase == RolloutPhase::shadow) return "shadow";
  const auto step = static_cast<std::size_t>(rollout.step);
  return "step " + std::to_string(step + 1) + " of " + std::to_string(rollout.steps.size()) + ", " +
         std::to_string(rollout.steps[step]) + " %";
}

json::object counts_of(const VersionCounts& counted) {
  json::object compute;
  for (const auto& [bucket, latencies] : counted.compute) compute[bucket] = latencies.to_json();
  return {{"requests", counted.requests}, {"errors", counted.errors}, {"compute_ns", std::move(compute)}};
}

RolloutVerdict failed(const Rollout& rollout, const Watched& watched, std::string gate, std::string text) {
  json::object evidence{{"gate", gate},
                        {"at", rollout.phase == RolloutPhase::loading ? "loading" : place(rollout)},
                        {"new", counts_of(watched.fresh)},
                        {"old", counts_of(watched.old)},
                        {"compared", watched.compared},
                        {"differed", watched.differed}};
  if (!watched.worst.empty()) evidence["requests"] = json::value_from(watched.worst);
  return {Move::take_back, gate, gate + ": " + std::move(text), std::move(evidence)};
}

std::optional<RolloutVerdict> judge_rate(const Rollout& rollout, const Watched& watched, const Look& look,
                                         const char* gate, const char* what, std::optional<double> limit,
                                         std::int64_t count, std::int64_t of) {
  if (!limit || !rate_is_above(count, of, *limit, look.level())) return std::nullopt;
  const double bound = lower_bound_of_rate(count, of, look.level());
  return failed(rollout, watched, gate,
                std::to_string(count) + " of " + std::to_string(of) + what + ", at least " + percent(bound) +
                    " with a confidence of " + look.confidence() + "; allowed is " + percent(*limit));
}

std::optional<RolloutVerdict> judge_p99(const Rollout& rollout, const Watched& watched, const Look& look,
                                        const QuantileRatio& ratio) {
  const double limit = *rollout.gates.p99;
  if (ratio.lower_bound <= limit) return std::nullopt;
  return failed(rollout, watched, "p99",
                "its batches take " + digits(ratio.estimate) + " times as long at equal buckets, at least " +
                    digits(ratio.lower_bound) + " times with a confidence of " + look.confidence() + "; allowed is " +
                    digits(limit));
}

std::string progress(const Rollout& rollout, const Watched& watched) {
  const char* what = rollout.phase == RolloutPhase::shadow ? " compared requests" : " requests";
  std::string text = place(rollout) + ": " + std::to_string(watched.held_ms / 1000) + " of " +
                     std::to_string(rollout.hold_s) + " s, " + std::to_string(seen(rollout, watched)) + " of " +
                     std::to_string(rollout.min_requests) + what;
  return watched.can_answer ? text : text + "; version `" + rollout.version + "` cannot answer now";
}

RolloutVerdict judge_phase(const Rollout& rollout, const Watched& watched) {
  const Look look = look_at(rollout, watched);
  const bool steps = rollout.phase == RolloutPhase::step;
  if (steps)
    if (auto bad = judge_rate(rollout, watched, look, "errors", " requests failed", rollout.gates.errors,
                              watched.fresh.errors, watched.fresh.requests))
      return *std::move(bad);
  if (auto bad = judge_rate(rollout, watched, look, "mismatch", " compared requests differed", rollout.gates.mismatch,
                            watched.differed, watched.compared))
    return *std::move(bad);
  std::optional<QuantileRatio> ratio;
  if (steps && rollout.gates.p99) {
    ratio = ratio_of_quantiles(watched.fresh.compute, watched.old.compute, kQuantile, look.level());
    if (ratio)
      if (auto bad = judge_p99(rollout, watched, look, *ratio)) return *std::move(bad);
  }
  RolloutVerdict verdict{Move::wait, "", progress(rollout, watched), {}};
  if (!look.final()) return verdict;
  if (steps && rollout.last_step() && rollout.gates.p99 && !ratio) {
    verdict.text += "; no bucket of its batches is one that version `" + rollout.from + "` ran often enough to compare";
    return verdict;
  }
  verdict.move = steps && rollout.last_step() ? Move::promote : Move::go_on;
  return verdict;
}

json::value of_model(const std::string& name, json::object change) { return {{"models", {{name, std::move(change)}}}}; }

json::object next_phase(const Rollout& rollout) {
  if (rollout.phase == RolloutPhase::loading && rollout.gates.mismatch) return {{"phase", "shadow"}};
  if (rollout.phase != RolloutPhase::step) return {{"phase", "step"}, {"step", 0}};
  return {{"step", rollout.step + 1}};
}

json::object taken_back(std::string_view reason, const json::object& evidence) {
  return {{"rollout", {{"phase", "taken_back"}, {"reason", reason}, {"evidence", evidence}}}};
}

}  // namespace

RolloutVerdict judge(const Rollout& rollout, const Watched& watched) {
  if (!rollout.runs()) return {Move::wait, "", std::string(name_of(rollout.phase)), {}};
  if (!watched.failed.empty()) return failed(rollout, watched, "load", watched.failed);
  if (rollout.phase != RolloutPhase::loading) return judge_phase(rollout, watched);
  if (watched.can_answer) return {Move::go_on, "", "version `" + rollout.version + "` is ready", {}};
  return {Move::wait, "", "version `" + rollout.version + "` is not ready yet", {}};
}

std::optional<json::value> patch_of(const std::string& model_name, const Rollout& rollout,
                                    const RolloutVerdict& verdict) {
  switch (verdict.move) {
    case Move::wait:
      return std::nullopt;
    case Move::go_on:
      return of_model(model_name, {{"rollout", next_phase(rollout)}});
    case Move::promote:
      return of_model(model_name, {{"labels", {{"stable", rollout.version}}}, {"rollout", {{"phase", "promoted"}}}});
    case Move::take_back:
      return of_model(model_name, taken_back(verdict.text, verdict.evidence));
  }
  return std::nullopt;
}

std::optional<json::value> resumption(const std::string& model_name, const ModelState& model) {
  if (!model.rolls() || model.rollout->phase != RolloutPhase::step) return std::nullopt;
  const Rollout& rollout = *model.rollout;
  if (!rollout.gates.p99 || !rollout.last_step() || rollout.step == 0) return std::nullopt;
  return of_model(model_name, {{"rollout", {{"step", rollout.step - 1}}}});
}

Result<json::value> rollback(const std::string& model_name, const ModelState& model) {
  if (model.rolls()) return of_model(model_name, taken_back("by hand", {}));
  std::string back = model.previous;
  if (back.empty() && !model.labels.contains("stable") && model.traffic.empty() && model.versions.size() > 1)
    back = std::prev(model.versions.end(), 2)->first;
  if (back.empty())
    return Error{Code::conflict, "model `" + printable(model_name) +
                                     "` has no version to go back to: move the label "
                                     "`stable` to one"};
  json::object traffic{{"stable", 100}};
  for (const auto& [name, share] : model.traffic)
    if (name != "stable") traffic[name] = nullptr;
  return of_model(model_name, {{"labels", {{"stable", back}}}, {"traffic", std::move(traffic)}});
}

}  // namespace mctl
