// What the server counts, as text and as JSON.
#include "engine/metrics.h"

#include <boost/test/unit_test.hpp>

#include "support.h"

namespace mctl {
namespace {

BOOST_AUTO_TEST_CASE(metrics_add_up) {
  Manifest manifest;
  manifest.name = "m";
  manifest.version = "1";
  Metrics metrics(manifest);
  metrics.request(Outcome::ok, 400'000);              // 0.4 ms
  metrics.request(Outcome::expired, 20'000'000'000);  // beyond the last bound
  const BatchFacts batch{"batch=4", Reason::idle, 3, 4};
  metrics.batch_started(batch);
  metrics.batch_done(batch, {.requests = 2, .rows = 3, .queue_ns = 7}, 10, 20, 30);
  const std::string text = metrics.prometheus({});
  const auto has = [&](const std::string& line) { return text.find("\n" + line + "\n") != std::string::npos; };
  const std::string model = R"(model="m",version="1")";
  BOOST_TEST(has("mctl_requests_total{" + model + R"(,code="ok"} 1)"));
  BOOST_TEST(has("mctl_request_duration_seconds_bucket{" + model + R"(,le="0.00025"} 0)"));
  BOOST_TEST(has("mctl_request_duration_seconds_bucket{" + model + R"(,le="0.0005"} 1)"));
  BOOST_TEST(has("mctl_request_duration_seconds_bucket{" + model + R"(,le="10"} 1)"));
  BOOST_TEST(has("mctl_request_duration_seconds_bucket{" + model + R"(,le="+Inf"} 2)"));
  BOOST_TEST(has("mctl_request_duration_seconds_count{" + model + "} 2"));
  BOOST_TEST(has("mctl_batch_rows_bucket{" + model + R"(,le="4"} 1)"));
  BOOST_TEST(has("mctl_batches_total{" + model + R"(,bucket="batch=4",reason="idle"} 1)"));
  BOOST_TEST(has("mctl_padded_rows_total{" + model + "} 1"));
  const auto stats = boost::json::parse(metrics.statistics()).at("model_stats").at(0);
  BOOST_TEST(stats.at("inference_count").as_int64() == 3);
  BOOST_TEST(stats.at("execution_count").as_int64() == 1);
  const auto pair = [](const boost::json::value& of) {
    return std::pair(of.at("count").as_int64(), of.at("ns").as_int64());
  };
  const auto& requests = stats.at("inference_stats");  // each of the two waited and ran for the whole batch
  BOOST_TEST((pair(requests.at("queue")) == std::pair(2l, 7l)));
  BOOST_TEST((pair(requests.at("compute_input")) == std::pair(2l, 20l)));
  BOOST_TEST((pair(requests.at("compute_infer")) == std::pair(2l, 40l)));
  BOOST_TEST((pair(requests.at("compute_output")) == std::pair(2l, 60l)));
  const auto& executions = stats.at("batch_stats").at(0);
  BOOST_TEST(executions.at("batch_size").as_int64() == 3);
  BOOST_TEST((pair(executions.at("compute_infer")) == std::pair(1l, 20l)));
}

BOOST_AUTO_TEST_CASE(metrics_labels_are_escaped) {
  Manifest manifest;
  manifest.name = "a\"b\\c\nd";
  manifest.version = "1";
  const std::string text = Metrics(manifest).prometheus({});
  BOOST_TEST(text.find("\nmctl_queue_rows{model=\"a\\\"b\\\\c\\nd\",version=\"1\"} 0\n") != std::string::npos);
}

}  // namespace
}  // namespace mctl
