// What the server counts, as text and as JSON.
#include "doors/exposition.h"

#include <boost/test/unit_test.hpp>

#include "support.h"

namespace mctl {
namespace {

BOOST_AUTO_TEST_CASE(metrics_add_up) {
  const Manifest manifest;
  Metrics metrics;
  metrics.request(Outcome::ok, 400'000);              // 0.4 ms
  metrics.request(Outcome::expired, 20'000'000'000);  // beyond the last bound
  const BatchFacts batch{"batch=4", Reason::idle, 3, 4};
  metrics.batch_started(batch);
  metrics.batch_done(batch, {.requests = 2, .rows = 3, .queue_ns = 7}, 10, 20, 30);
  const Counted models[] = {{"m", "1", manifest, metrics}};
  const std::string text = prometheus(models);
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
  const auto stats = boost::json::parse(statistics(models)).at("model_stats").at(0);
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

BOOST_AUTO_TEST_CASE(metrics_of_handlers_are_those_of_models_that_have_one) {
  const Manifest manifest;
  const Metrics metrics;
  HandlerMetrics handler;
  handler.request(Outcome::error, 400'000);
  ++handler.restarts["stuck"];
  const Counted models[] = {{"plain", "1", manifest, metrics, {}, nullptr, {}},
                            {"m", "1", manifest, metrics, {}, &handler, {3, 2, 1, 0, {}}}};
  const std::string text = prometheus(models);
  const auto has = [&](const std::string& line) { return text.find("\n" + line + "\n") != std::string::npos; };
  const std::string model = R"(model="m",version="1")";
  BOOST_TEST(has("mctl_handler_requests_total{" + model + R"(,code="error"} 1)"));
  BOOST_TEST(has("mctl_handler_request_duration_seconds_bucket{" + model + R"(,le="0.0005"} 1)"));
  BOOST_TEST(has("mctl_handler_restarts_total{" + model + R"(,reason="stuck"} 1)"));
  BOOST_TEST(has("mctl_handler_queue_requests{" + model + "} 3"));
  BOOST_TEST(has("mctl_handler_running_requests{" + model + "} 2"));
  BOOST_TEST(has("mctl_handler_processes{" + model + R"(,state="live"} 1)"));
  BOOST_TEST(text.find(R"(mctl_handler_calls_total{model="plain")") == std::string::npos);
  BOOST_TEST(prometheus(std::span(models).first(1)).find("mctl_handler") == std::string::npos);
}

BOOST_AUTO_TEST_CASE(metrics_labels_are_escaped) {
  const Manifest manifest;
  const Metrics metrics;
  const Counted models[] = {{"a\"b\\c\nd", "1", manifest, metrics}};
  const std::string text = prometheus(models);
  BOOST_TEST(text.find("\nmctl_queue_rows{model=\"a\\\"b\\\\c\\nd\",version=\"1\"} 0\n") != std::string::npos);
}

// HELP and TYPE once for a family, however many models there are; its samples follow it.
BOOST_AUTO_TEST_CASE(metrics_of_two_models) {
  const Manifest manifest;
  Metrics one, two;
  one.request(Outcome::ok, 1);
  two.request(Outcome::ok, 1);
  two.request(Outcome::ok, 1);
  const Counted models[] = {{"m", "1", manifest, one}, {"m", "2", manifest, two}};
  const std::string text = prometheus(models);
  const std::string type = "# TYPE mctl_requests_total counter\n";
  const auto at = text.find(type);
  BOOST_REQUIRE(at != std::string::npos);
  BOOST_TEST(text.find(type, at + 1) == std::string::npos);
  const auto family = text.substr(at + type.size(), text.find('#', at + type.size()) - at - type.size());
  BOOST_TEST(family.find("{model=\"m\",version=\"1\",code=\"ok\"} 1\n") != std::string::npos);
  BOOST_TEST(family.find("{model=\"m\",version=\"2\",code=\"ok\"} 2\n") != std::string::npos);
  BOOST_TEST(boost::json::parse(statistics(models)).at("model_stats").as_array().size() == 2u);
}

}  // namespace
}  // namespace mctl
