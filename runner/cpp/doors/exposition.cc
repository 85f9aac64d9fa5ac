#include "doors/exposition.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "format/text.h"

namespace mctl {
namespace {

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

void single(std::string& out, std::string_view name, std::string_view type, std::string_view help, double value) {
  describe(out, name, type, help);
  sample(out, name, "", text_of(value));
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

struct Labeled : Counted {
  std::string labels;  // model and version
};

// The families: HELP and TYPE once, then `print` for each model.
class Families {
 public:
  Families(std::string& out, std::span<const Counted> models) : out_(out) {
    for (const Counted& model : models) {
      labeled_.push_back({model, label("model", model.name) + ',' + label("version", model.version)});
    }
  }

  template <class Print>
  void family(std::string_view name, std::string_view type, std::string_view help, Print print) {
    describe(out_, name, type, help);
    for (const Labeled& model : labeled_) print(name, model);
  }

  // One sample for each model.
  template <class Value>
  void each(std::string_view name, std::string_view type, std::string_view help, Value value) {
    family(name, type, help, [&](std::string_view family, const Labeled& model) {
      sample(out_, family, model.labels, text_of(static_cast<double>(value(model))));
    });
  }

  void histogram(std::string_view name, const Histogram& histogram, const std::string& labels) {
    const std::string base(name), prefix = labels + ',';
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < histogram.counts().size(); ++i) {
      total += histogram.counts()[i];
      const bool last = i == histogram.bounds().size();
      const std::string bound = last ? "+Inf" : text_of_bound(histogram.bounds()[i]);
      sample(out_, base + "_bucket", prefix + label("le", bound), std::to_string(total));
    }
    sample(out_, base + "_sum", labels, text_of(histogram.sum()));
    sample(out_, base + "_count", labels, std::to_string(total));
  }

  void add(std::string_view name, const std::string& labels, const std::string& value) {
    sample(out_, name, labels, value);
  }

 private:
  std::string& out_;
  std::vector<Labeled> labeled_;
};

void append_requests(Families& to) {
  to.family("mctl_requests_total", "counter", "Inference requests by how they ended.", [&](auto name, const auto& of) {
    for (std::size_t i = 0; i < kOutcomes.size(); ++i) {
      to.add(name, of.labels + ',' + label("code", kOutcomes[i]), std::to_string(of.metrics.requests[i]));
    }
  });
  to.family("mctl_request_duration_seconds", "histogram", "From the last byte of a request to its answer.",
            [&](auto name, const auto& of) { to.histogram(name, of.metrics.request_seconds, of.labels); });
  to.family("mctl_queue_duration_seconds", "histogram", "From a request's arrival until a worker began its batch.",
            [&](auto name, const auto& of) { to.histogram(name, of.metrics.queue_seconds, of.labels); });
  to.each("mctl_queue_rows", "gauge", "Rows that wait.", [](const auto& of) { return of.gauges.queue_rows; });
  to.each("mctl_queue_capacity_rows", "gauge", "Rows that may wait.",
          [](const auto& of) { return of.gauges.queue_capacity; });
  to.each("mctl_batch_limit_rows", "gauge", "Rows that a batch may have now.",
          [](const auto& of) { return of.gauges.limit; });
  to.each("mctl_expected_wait_seconds", "gauge", "Estimated time until a batch formed now would begin.",
          [](const auto& of) { return static_cast<double>(of.gauges.expected_wait_us) * 1e-6; });
  to.each("mctl_inflight_batches", "gauge", "Batches that workers hold.",
          [](const auto& of) { return of.gauges.inflight; });
}

void append_shadow(Families& to) {
  to.family("mctl_shadow_requests_total", "counter", "Requests of other versions that this one was tried with.",
            [&](auto name, const auto& of) {
              const Shadowed& counted = of.metrics.shadowed;
              const auto add = [&](std::string_view result, std::uint64_t count) {
                to.add(name, of.labels + ',' + label("result", result), std::to_string(count));
              };
              add("same", counted.compared - counted.differed);
              add("differs", counted.differed);
              add("dropped", counted.dropped);
            });
}

void append_workers(Families& to) {
  to.each("mctl_model_ready", "gauge", "1 while requests are accepted.",
          [](const auto& of) { return of.gauges.ready; });
  to.family("mctl_workers", "gauge", "Worker processes by what they do.", [&](auto name, const auto& of) {
    to.add(name, of.labels + ',' + label("state", "live"), std::to_string(of.gauges.live_workers));
    to.add(name, of.labels + ',' + label("state", "starting"), std::to_string(of.gauges.starting_workers));
  });
  to.family("mctl_worker_restarts_total", "counter", "Workers that were replaced.", [&](auto name, const auto& of) {
    for (const auto& [reason, count] : of.metrics.restarts) {
      to.add(name, of.labels + ',' + label("reason", reason), std::to_string(count));
    }
  });
  to.family("mctl_bundle_info", "gauge", "What is served.", [&](auto name, const auto& of) {
    const Manifest& manifest = of.manifest;
    to.add(name,
           of.labels + ',' + label("digest", manifest.digest) + ',' + label("torch", manifest.torch) + ',' +
               label("target", manifest.target.arch + '-' + manifest.target.isa),
           "1");
  });
  to.family("mctl_load_seconds", "gauge", "Time that the last worker took to get ready.",
            [&](auto name, const auto& of) {
              for (std::size_t i = 0; i < of.metrics.load_seconds.size(); ++i) {
                to.add(name, of.labels + ',' + label("phase", kPhases[i]), text_of(of.metrics.load_seconds[i]));
              }
            });
}

void append_batches(Families& to) {
  to.family("mctl_compute_duration_seconds", "histogram", "The model's own time for a batch.",
            [&](auto name, const auto& of) {
              for (const auto& [bucket, seconds] : of.metrics.compute_seconds) {
                to.histogram(name, seconds, of.labels + ',' + label("bucket", bucket));
              }
            });
  to.family("mctl_batch_rows", "histogram", "Rows of a batch before padding.",
            [&](auto name, const auto& of) { to.histogram(name, of.metrics.batch_rows, of.labels); });
  to.family("mctl_batches_total", "counter", "Batches by bucket and by why they started.",
            [&](auto name, const auto& of) {
              for (const auto& [key, count] : of.metrics.batches) {
                const std::string labels = label("bucket", key.first) + ',' + label("reason", name_of(key.second));
                to.add(name, of.labels + ',' + labels, std::to_string(count));
              }
            });
  to.each("mctl_padded_rows_total", "counter", "Rows added to fill batches up.",
          [](const auto& of) { return of.metrics.padded_rows; });
}

// Of the models that have a handler.
void append_handlers(Families& to) {
  to.family("mctl_handler_requests_total", "counter", "Requests to handlers by how they ended.",
            [&](auto name, const auto& of) {
              for (std::size_t i = 0; i < kOutcomes.size(); ++i) {
                to.add(name, of.labels + ',' + label("code", kOutcomes[i]), std::to_string(of.handler->requests[i]));
              }
            });
  to.family("mctl_handler_request_duration_seconds", "histogram",
            "From the last byte of a request to its answer's end.",
            [&](auto name, const auto& of) { to.histogram(name, of.handler->seconds, of.labels); });
  to.each("mctl_handler_calls_total", "counter", "Calls of models that handlers made.",
          [](const auto& of) { return of.handler->calls; });
  to.each("mctl_handler_queue_requests", "gauge", "Requests that wait for a handler.",
          [](const auto& of) { return of.handler_gauges.queued; });
  to.each("mctl_handler_running_requests", "gauge", "Requests that handlers have.",
          [](const auto& of) { return of.handler_gauges.running; });
  to.family("mctl_handler_processes", "gauge", "Handler processes by what they do.", [&](auto name, const auto& of) {
    to.add(name, of.labels + ',' + label("state", "live"), std::to_string(of.handler_gauges.live));
    to.add(name, of.labels + ',' + label("state", "starting"), std::to_string(of.handler_gauges.starting));
  });
  to.family("mctl_handler_restarts_total", "counter", "Handler processes that were replaced.",
            [&](auto name, const auto& of) {
              for (const auto& [reason, count] : of.handler->restarts) {
                to.add(name, of.labels + ',' + label("reason", reason), std::to_string(count));
              }
            });
}

void append_process(std::string& out, std::span<const Counted> models) {
  const ProcessUse front = use_of("self");
  ProcessUse all = front;
  for (const Counted& model : models) {
    all.cpu_seconds += model.metrics.ended_cpu_seconds;
    if (model.handler) all.cpu_seconds += model.handler->ended_cpu_seconds;
    std::vector<int> pids = model.gauges.workers;
    pids.insert(pids.end(), model.handler_gauges.processes.begin(), model.handler_gauges.processes.end());
    for (const int pid : pids) {
      const ProcessUse worker = use_of(std::to_string(pid));
      all.cpu_seconds += worker.cpu_seconds;
      all.resident += worker.resident;
      all.virtual_size += worker.virtual_size;
    }
  }
  constexpr std::string_view together = " Front, workers and handlers together.";
  const auto about = [&](std::string_view help) { return std::string(help) + std::string(together); };
  single(out, "process_cpu_seconds_total", "counter", about("User and system time."), all.cpu_seconds);
  single(out, "process_resident_memory_bytes", "gauge", about("Resident memory, shared pages once for each."),
         all.resident);
  single(out, "process_virtual_memory_bytes", "gauge", about("Virtual memory."), all.virtual_size);
  single(out, "process_open_fds", "gauge", "Open descriptors of the front process.", open_descriptors());
  single(out, "process_max_fds", "gauge", "Descriptors that the front process may open.",
         static_cast<double>(sysconf(_SC_OPEN_MAX)));
  const double started = boot_time() + front.start_ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  single(out, "process_start_time_seconds", "gauge", "Start of the front process, since the epoch.", started);
}

void append_statistics(std::string& out, const Counted& model) {
  const Metrics& counted = model.metrics;
  out += "{\"name\":";
  append_json_string(out, model.name);
  out += ",\"version\":";
  append_json_string(out, model.version);
  out += ",\"last_inference\":" + std::to_string(counted.last_ms) +
         ",\"inference_count\":" + std::to_string(counted.inferences) +
         ",\"execution_count\":" + std::to_string(counted.executions);
  out += ",\"inference_stats\":{\"success\":" + json_of(counted.success) + ",\"fail\":" + json_of(counted.fail) +
         ",\"queue\":" + json_of(counted.queue) + ",\"compute_input\":" + json_of(counted.input) +
         ",\"compute_infer\":" + json_of(counted.infer) + ",\"compute_output\":" + json_of(counted.output) +
         ",\"cache_hit\":" + json_of({}) + ",\"cache_miss\":" + json_of({}) + "},\"batch_stats\":[";
  bool first = true;
  for (const auto& [rows, parts] : counted.by_rows) {
    if (!first) out += ',';
    first = false;
    out += "{\"batch_size\":" + std::to_string(rows) + ",\"compute_input\":" + json_of(parts[0]) +
           ",\"compute_infer\":" + json_of(parts[1]) + ",\"compute_output\":" + json_of(parts[2]) + "}";
  }
  out += "]}";
}

}  // namespace

std::string prometheus(std::span<const Counted> models) {
  std::string out;
  Families families(out, models);
  append_requests(families);
  append_shadow(families);
  append_workers(families);
  append_batches(families);
  std::vector<Counted> handled;
  std::ranges::copy_if(models, std::back_inserter(handled), [](const Counted& model) { return model.handler; });
  Families of_handlers(out, handled);
  if (!handled.empty()) append_handlers(of_handlers);
  append_process(out, models);
  return out;
}

std::string statistics(std::span<const Counted> models) {
  std::string out = "{\"model_stats\":[";
  for (const Counted& model : models) {
    if (out.back() == '}') out += ',';
    append_statistics(out, model);
  }
  return out + "]}";
}

}  // namespace mctl
