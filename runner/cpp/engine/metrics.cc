#include "engine/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "doors/http.h"

namespace mctl {
namespace {

constexpr double kSeconds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                               0.05,   0.1,     0.25,   0.5,   1,      2.5,   5,    10};
constexpr double kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
constexpr std::string_view kPhases[] = {"verify", "load", "warmup", "golden"};

std::string text_of(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// Never with an exponent: bounds are labels, which are compared as text.
std::string text_of_bound(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::fixed).ptr};
}

// A label with its value escaped as Prometheus wants it.
std::string label(std::string_view name, std::string_view value) {
  std::string text = std::string(name) + "=\"";
  for (const char c : value) {
    if (c == '\\' || c == '"' || c == '\n') text += '\\';
    text += c == '\n' ? 'n' : c;
  }
  return text + '"';
}

void describe(std::string& out, std::string_view name, std::string_view type, std::string_view help) {
  out += "# HELP " + std::string(name) + ' ' + std::string(help) + "\n# TYPE " + std::string(name) + ' ' +
         std::string(type) + '\n';
}

void sample(std::string& out, std::string_view name, std::string_view labels, const std::string& value) {
  out += name;
  if (!labels.empty()) (out += '{') += std::string(labels) + '}';
  out += ' ' + value + '\n';
}

void single(std::string& out, std::string_view name, std::string_view type, std::string_view help,
            std::string_view labels, double value) {
  describe(out, name, type, help);
  sample(out, name, labels, text_of(value));
}

struct ProcessUse {
  double cpu_seconds = 0, resident = 0, virtual_size = 0, start_ticks = 0;
};

// From /proc/PID/stat; zeros for a process that is gone.
ProcessUse use_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};  // [0] is the third of proc(5)
  if (fields.size() < 22) return {};
  const auto number = [&](std::size_t field) { return std::strtod(fields[field - 3].c_str(), nullptr); };
  const double hertz = static_cast<double>(sysconf(_SC_CLK_TCK)), page = static_cast<double>(sysconf(_SC_PAGESIZE));
  return {(number(14) + number(15)) / hertz, number(24) * page, number(23), number(22)};
}

double boot_time() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("btime ")) return std::strtod(line.c_str() + 6, nullptr);
  }
  return 0;
}

double open_descriptors() {
  std::error_code ec;
  std::filesystem::directory_iterator entries("/proc/self/fd", ec);
  return ec ? 0 : static_cast<double>(std::distance(begin(entries), end(entries)));
}

std::string json_of(const Duration& duration) {
  return "{\"count\":" + std::to_string(duration.count) + ",\"ns\":" + std::to_string(duration.ns) + "}";
}

}  // namespace

Outcome outcome_of(unsigned status) {
  if (status == 200) return Outcome::ok;
  if (status == 503) return Outcome::rejected;
  if (status == 504) return Outcome::expired;
  return status == 500 ? Outcome::error : Outcome::invalid;
}

// --- histograms
// -------------------------------------------------------------------------------------------------------

Histogram Histogram::of_seconds() { return Histogram(kSeconds); }
Histogram Histogram::of_rows() { return Histogram(kRows); }

void Histogram::add(double value) {
  ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()];
  sum_ += value;
}

void Histogram::append(std::string& out, std::string_view name, std::string_view labels) const {
  const std::string base(name), prefix = std::string(labels) + ',';
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const std::string bound = i < bounds_.size() ? text_of_bound(bounds_[i]) : "+Inf";
    sample(out, base + "_bucket", prefix + label("le", bound), std::to_string(total));
  }
  sample(out, base + "_sum", labels, text_of(sum_));
  sample(out, base + "_count", labels, std::to_string(total));
}

// --- counting
// ---------------------------------------------------------------------------------------------------------

Metrics::Metrics(const Manifest& manifest)
    : manifest_(manifest), labels_(label("model", manifest.name) + ',' + label("version", manifest.version)) {}

void Metrics::request(Outcome outcome, std::uint64_t total_ns) {
  ++requests_[static_cast<std::size_t>(outcome)];
  request_.add(static_cast<double>(total_ns) * 1e-9);
  (outcome == Outcome::ok ? success_ : fail_).add(total_ns);
}

void Metrics::waited(std::uint64_t queue_ns) { queue_.add(static_cast<double>(queue_ns) * 1e-9); }

void Metrics::batch_started(const BatchFacts& batch) {
  ++batches_[{batch.bucket, batch.reason}];
  rows_.add(static_cast<double>(batch.rows));
  padded_rows_ += static_cast<std::uint64_t>(batch.padded - batch.rows);
}

void Metrics::batch_done(const BatchFacts& batch, const Answered& answered, std::uint64_t input_ns,
                         std::uint64_t compute_ns, std::uint64_t output_ns) {
  compute_.try_emplace(batch.bucket, Histogram::of_seconds()).first->second.add(static_cast<double>(compute_ns) * 1e-9);
  auto& mine = by_rows_[batch.rows];
  mine[0].add(input_ns);
  mine[1].add(compute_ns);
  mine[2].add(output_ns);
  input_.add(input_ns, answered.requests);
  infer_.add(compute_ns, answered.requests);
  output_.add(output_ns, answered.requests);
  waits_.count += answered.requests;
  waits_.ns += answered.queue_ns;
  inferences_ += answered.rows;
  ++executions_;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  last_ms_ = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// --- Prometheus
// -------------------------------------------------------------------------------------------------------

std::string Metrics::prometheus(const Gauges& gauges) const {
  std::string out;
  append_serving(out, gauges);
  append_batches(out);
  append_process(out, gauges);
  return out;
}

void Metrics::append_serving(std::string& out, const Gauges& gauges) const {
  describe(out, "mctl_requests_total", "counter", "Inference requests by how they ended.");
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    sample(out, "mctl_requests_total", labels_ + ',' + label("code", kOutcomes[i]), std::to_string(requests_[i]));
  }
  describe(out, "mctl_request_duration_seconds", "histogram", "From the last byte of a request to its answer.");
  request_.append(out, "mctl_request_duration_seconds", labels_);
  describe(out, "mctl_queue_duration_seconds", "histogram",
           "From a request's arrival until a worker was handed its batch.");
  queue_.append(out, "mctl_queue_duration_seconds", labels_);
  single(out, "mctl_queue_rows", "gauge", "Rows that wait.", labels_, gauges.queue_rows);
  single(out, "mctl_queue_capacity_rows", "gauge", "Rows that may wait.", labels_, gauges.queue_capacity);
  single(out, "mctl_batch_limit_rows", "gauge", "Rows that a batch may have now.", labels_, gauges.limit);
  single(out, "mctl_expected_wait_seconds", "gauge", "Estimated time until a batch formed now would begin.", labels_,
         static_cast<double>(gauges.expected_wait_us) * 1e-6);
  single(out, "mctl_inflight_batches", "gauge", "Batches that workers hold.", labels_, gauges.inflight);
  single(out, "mctl_model_ready", "gauge", "1 while requests are accepted.", labels_, gauges.ready);
  describe(out, "mctl_workers", "gauge", "Worker processes by what they do.");
  sample(out, "mctl_workers", labels_ + ',' + label("state", "live"), std::to_string(gauges.live_workers));
  sample(out, "mctl_workers", labels_ + ',' + label("state", "starting"), std::to_string(gauges.starting_workers));
  describe(out, "mctl_worker_restarts_total", "counter", "Workers that were replaced.");
  for (const auto& [reason, count] : restarts_) {
    sample(out, "mctl_worker_restarts_total", labels_ + ',' + label("reason", reason), std::to_string(count));
  }
  const std::string target = manifest_.target.arch + '-' + manifest_.target.isa;
  single(out, "mctl_bundle_info", "gauge", "What is served.",
         labels_ + ',' + label("digest", manifest_.digest) + ',' + label("torch", manifest_.torch) + ',' +
             label("target", target),
         1);
  describe(out, "mctl_load_seconds", "gauge", "Time that the last worker took to get ready.");
  for (std::size_t i = 0; i < load_seconds_.size(); ++i) {
    sample(out, "mctl_load_seconds", labels_ + ',' + label("phase", kPhases[i]), text_of(load_seconds_[i]));
  }
}

void Metrics::append_batches(std::string& out) const {
  describe(out, "mctl_compute_duration_seconds", "histogram", "The model's own time for a batch.");
  for (const auto& [bucket, histogram] : compute_) {
    histogram.append(out, "mctl_compute_duration_seconds", labels_ + ',' + label("bucket", bucket));
  }
  describe(out, "mctl_batch_rows", "histogram", "Rows of a batch before padding.");
  rows_.append(out, "mctl_batch_rows", labels_);
  describe(out, "mctl_batches_total", "counter", "Batches by bucket and by why they started.");
  for (const auto& [key, count] : batches_) {
    sample(out, "mctl_batches_total",
           labels_ + ',' + label("bucket", key.first) + ',' + label("reason", name_of(key.second)),
           std::to_string(count));
  }
  single(out, "mctl_padded_rows_total", "counter", "Rows added to fill batches up.", labels_,
         static_cast<double>(padded_rows_));
}

void Metrics::append_process(std::string& out, const Gauges& gauges) const {
  const ProcessUse front = use_of("self");
  ProcessUse all = front;
  all.cpu_seconds += ended_cpu_seconds_;
  for (const pid_t pid : gauges.workers) {
    const ProcessUse worker = use_of(std::to_string(pid));
    all.cpu_seconds += worker.cpu_seconds;
    all.resident += worker.resident;
    all.virtual_size += worker.virtual_size;
  }
  constexpr std::string_view together = " Front and workers together.";
  const auto about = [&](std::string_view help) { return std::string(help) + std::string(together); };
  single(out, "process_cpu_seconds_total", "counter", about("User and system time."), "", all.cpu_seconds);
  single(out, "process_resident_memory_bytes", "gauge", about("Resident memory, shared pages once for each."), "",
         all.resident);
  single(out, "process_virtual_memory_bytes", "gauge", about("Virtual memory."), "", all.virtual_size);
  single(out, "process_open_fds", "gauge", "Open descriptors of the front process.", "", open_descriptors());
  single(out, "process_max_fds", "gauge", "Descriptors that the front process may open.", "",
         static_cast<double>(sysconf(_SC_OPEN_MAX)));
  const double started = boot_time() + front.start_ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  single(out, "process_start_time_seconds", "gauge", "Start of the front process, since the epoch.", "", started);
}

// --- Triton's statistics
// ----------------------------------------------------------------------------------------------

std::string Metrics::statistics() const {
  std::string out = "{\"model_stats\":[{\"name\":";
  append_json_string(out, manifest_.name);
  out += ",\"version\":";
  append_json_string(out, manifest_.version);
  out += ",\"last_inference\":" + std::to_string(last_ms_) + ",\"inference_count\":" + std::to_string(inferences_) +
         ",\"execution_count\":" + std::to_string(executions_);
  out += ",\"inference_stats\":{\"success\":" + json_of(success_) + ",\"fail\":" + json_of(fail_) +
         ",\"queue\":" + json_of(waits_) + ",\"compute_input\":" + json_of(input_) +
         ",\"compute_infer\":" + json_of(infer_) + ",\"compute_output\":" + json_of(output_) +
         ",\"cache_hit\":" + json_of({}) + ",\"cache_miss\":" + json_of({}) + "},\"batch_stats\":[";
  bool first = true;
  for (const auto& [rows, parts] : by_rows_) {
    if (!first) out += ',';
    first = false;
    out += "{\"batch_size\":" + std::to_string(rows) + ",\"compute_input\":" + json_of(parts[0]) +
           ",\"compute_infer\":" + json_of(parts[1]) + ",\"compute_output\":" + json_of(parts[2]) + "}";
  }
  return out + "]}]}";
}

}  // namespace mctl
