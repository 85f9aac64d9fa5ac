#include "engine/batcher.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cstring>

#include "pool/model_areas.h"

namespace mctl {
namespace {

namespace asio = boost::asio;

constexpr std::int64_t kMicrosecond = 1000;

Error too_late(std::string_view where) {
  return {Code::deadline, "the request's deadline passed in the " + std::string(where)};
}

Error refused(const Estimate& estimate, std::int64_t time_us, bool by_target) {
  const auto ms = [](std::int64_t us) { return std::to_string(us / 1000); };
  Error error{Code::unavailable, "too much waits: the answer would take about " + ms(estimate.done_us + 999) +
                                     " ms, more than the " + ms(std::max<std::int64_t>(0, time_us)) + " ms that " +
                                     (by_target ? "the latency target" : "its timeout") +
                                     " leaves; try again later, or allow more with x-mctl-timeout-ms"};
  error.retry_after_s = std::max<std::int64_t>(1, (estimate.done_us - time_us + 999'999) / 1'000'000);
  return error;
}

}  // namespace

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

Batcher::Batcher(asio::io_context& io, const Manifest& manifest, const Lookup& lookup, Packing& packing,
                 BatchSettings settings, std::chrono::nanoseconds worker_timeout, Pool& pool, Metrics& metrics)
    : io_(io),
      manifest_(manifest),
      lookup_(lookup),
      packing_(packing),
      settings_(std::move(settings)),
      worker_timeout_(worker_timeout),
      pool_(pool),
      metrics_(metrics),
      timer_(io),
      pace_(settings_),
      slots_(pool.size()) {}

void Batcher::seed(std::span<const std::pair<DimSizes, std::int64_t>> costs) {
  std::vector<Seed> seeds;
  for (const auto& [sizes, us] : costs) {
    seeds.push_back({pace_.kind(packing_.kind_of(sizes)), settings_.padded(packing_.rows_of(sizes)), us});
  }
  pace_.seed(seeds);
}

// --- the queue

Status Batcher::admit(Client client, std::int64_t rows) {
  if (settings_.admits(waiting(), rows)) return Done{};
  look();
  const bool admitted = settings_.admits(waiting(), rows) || shares_.entitled(client, rows, settings_.max_queue_size);
  return admitted ? Status(Done{}) : full();
}

Error Batcher::full() const {
  return {Code::unavailable, "the queue is full: " + std::to_string(waiting()) + " of " +
                                 std::to_string(settings_.max_queue_size) + " rows wait"};
}

// Refuses the latest requests of the clients that have the most; false if those have to stay.
bool Batcher::make_room(std::int64_t rows) {
  while (!settings_.admits(waiting(), rows)) {
    const std::shared_ptr<Call> call = last_of(queue_, shares_.largest());
    if (call == nullptr) return false;
    end(*call, full());
  }
  return true;
}

// Would it be answered in time? A client of which nothing waits has its turn before all that does.
Status Batcher::in_time(const Call& call, const std::string& key, std::size_t kind) {
  const std::int64_t late_us = (now_ns() - call.arrival_ns) / kMicrosecond;  // it took this long to read
  const std::int64_t timeout_us = (call.deadline_ns - call.arrival_ns) / kMicrosecond;
  const std::int64_t time_us = pace_.time_us(timeout_us, call.deadline_stated) - late_us;
  const bool first = !shares_.waits(call.client);
  const Estimate estimate = pace_.estimate(key, kind, call.rows, free_after_us(), first);
  if (!estimate.too_late(time_us)) return Done{};
  pace_.refused(kind, call.deadline_stated);
  return refused(estimate, time_us, time_us + late_us < timeout_us);
}

void Batcher::enqueue(Waiting request) {
  request.client = request.call->client;
  request.turn = shares_.join(request.client, request.rows);
  pace_.joined(request.key, request.kind, request.rows);
  mctl::enqueue(queue_, std::move(request));
}

Status Batcher::submit(std::shared_ptr<Call> call) {
  if (auto admitted = admit(call->client, call->rows); !admitted) return admitted;
  std::string sizes = packing_.kind_of(call->dims);
  const std::size_t kind = pace_.kind(sizes);
  const bool alone = caution_.alone(now_ns() / kMicrosecond);
  const std::string key = alone ? packing_.lone_key() : packing_.key_of(std::move(sizes), call->inputs);
  if (auto admitted = in_time(*call, key, kind); !admitted) return admitted;
  if (!make_room(call->rows)) return full();
  const std::int64_t limit = pace_.limit();
  call->rows_left = call->rows;
  for (std::int64_t row = 0; row < call->rows; row += limit) {
    enqueue({call->arrival_ns / kMicrosecond, call->deadline_ns / kMicrosecond, std::min(limit, call->rows - row), key,
             call, row, false, kind});
  }
  fresh_ += call->rows;
  wake_at(call->deadline_ns);
  if (fresh_ < limit) {
    schedule();
  } else {
    look();
    dispatch();
  }
  return Done{};
}

// How long each live worker still has to run, as far as costs are known.
std::span<std::int64_t> Batcher::free_after_us() {
  const std::int64_t now = now_ns();
  free_after_us_.clear();
  for (std::size_t worker = 0; worker < slots_.size(); ++worker) {
    if (!pool_.live(worker)) continue;
    const Slots& slots = slots_[worker];
    std::int64_t left = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      const auto& batch = slots.held[slot];
      if (!batch || batch->done) continue;
      const std::int64_t cost = pace_.cost(batch->formed.kind, batch->formed.padded);
      const std::int64_t ran = runs_first(slots, slot) ? (now - batch->since_ns) / kMicrosecond : 0;
      left += std::max<std::int64_t>(0, cost - ran);
    }
    free_after_us_.push_back(left);
  }
  return free_after_us_;
}

// Of the batches that a worker holds, the one that it runs, or will first.
bool Batcher::runs_first(const Slots& slots, int slot) const {
  const auto& other = slots.held[slots.next];
  return slot == slots.next || !other || other->done;
}

bool Batcher::cancel(Call& call) {
  call.cancelled = true;
  if (!leave_queue(call)) return false;
  call.over = true;
  return true;
}

bool Batcher::leave_queue(const Call& call) {
  return std::erase_if(queue_, [&](const Waiting& request) {
           if (request.call.get() != &call) return false;
           pace_.left(request.key, request.rows);
           shares_.leave(call.client, request.rows);
           return true;
         }) > 0;
}

void Batcher::drain() {
  draining_ = true;
  schedule();
}

void Batcher::end(Call& call, const Error& error) {
  if (call.over) return;
  call.over = true;
  leave_queue(call);
  call.finished(&error);
}

void Batcher::expire_waiting(std::int64_t now) {
  for (Waiting& request : take_expired(queue_, now / kMicrosecond)) {
    pace_.left(request.key, request.rows);
    shares_.leave(request.call->client, request.rows);
    end(*request.call, too_late("queue"));
  }
}

// --- batches start

// Of sizes that the contract allows.
std::vector<std::pair<DimSizes, std::int64_t>> Batcher::costs_of(std::span<const std::int64_t> warm) const {
  const auto& dims = manifest_.contract.dims;
  std::vector<std::pair<DimSizes, std::int64_t>> costs;
  for (; warm.size() > dims.size(); warm = warm.subspan(dims.size() + 1)) {
    const auto sizes = warm.first(dims.size());
    const bool allowed = std::ranges::equal(
        sizes, dims, [](std::int64_t size, const Dim& dim) { return size >= dim.min && size <= dim.max; });
    const std::int64_t ns = warm[dims.size()];
    if (allowed && ns >= 0 && ns <= worker_timeout_.count())
      costs.emplace_back(DimSizes(sizes.begin(), sizes.end()), ns / kMicrosecond);
  }
  return costs;
}

// Workers came or went.
void Batcher::changed() {
  for (std::size_t worker = 0; worker < slots_.size() && !warm_; ++worker) {
    if (!pool_.live(worker)) continue;
    warm_ = true;
    seed(costs_of(pool_.arena(worker).report().warm));
  }
  if (const auto why = pool_.away()) refuse_waiting(*why);
  schedule();
}

// After what the sockets hold now has been read, so that it can share a batch; a full batch does not wait for that.
void Batcher::schedule() {
  if (scheduled_) return;
  scheduled_ = true;
  asio::post(io_, guard_([this] { dispatch(); }));
}

// Notices batches that are done: under load their doorbell stands in line behind hundreds of sockets.
void Batcher::look() {
  for (std::size_t worker = 0; worker < slots_.size(); ++worker) {
    if (pool_.live(worker)) rang(worker);
  }
}

void Batcher::dispatch() {
  scheduled_ = false;
  fresh_ = 0;
  const std::int64_t now = now_ns();
  expire_waiting(now);
  for (;;) {
    auto where = place(false);
    Room room = where ? Room::free : Room::none;
    if (!where && (where = place(true))) room = Room::ahead;
    const Decision decision = decide(settings_, pace_.limit(), queue_, now / kMicrosecond, room, draining_);
    if (decision.wake_us) wake_at(*decision.wake_us * kMicrosecond);
    if (decision.batch.empty()) return;
    start(*where, decision);
  }
}

// A worker that runs nothing, or (busy) one that runs a batch and has room for the next: the one that began first.
std::optional<Batcher::Place> Batcher::place(bool busy) const {
  std::optional<Place> found;
  std::int64_t since = 0;
  for (std::size_t w = 0; w < slots_.size(); ++w) {
    const Slots& slots = slots_[w];
    if (!pool_.live(w) || slots.held[slots.next]) continue;
    const auto& other = slots.held[1 - slots.next];
    const bool runs = other && !other->done;
    if (runs != busy || (found && busy && other->since_ns >= since)) continue;
    found = Place{w, slots.next};
    if (!busy) break;
    since = other->since_ns;
  }
  return found;
}

void Batcher::start(Place place, const Decision& decision) {
  Batch batch;
  for (const std::size_t index : decision.batch) batch.requests.push_back(std::move(queue_[index]));
  std::erase_if(queue_, [](const Waiting& request) { return !request.call; });
  const Waiting& first = batch.requests.front();
  pace_.left(first.key, decision.rows);
  for (const Waiting& request : batch.requests) {
    shares_.leave(request.call->client, request.rows);
    shares_.started(request.turn);
  }
  batch.formed = pace_.formed(first.kind, decision.rows, decision.reason == Reason::full);
  batch.sizes = packing_.sizes(first.call->dims, settings_.padded(decision.rows));
  const DimSizes bucket = packing_.sizes(first.call->dims, settings_.bucket(decision.rows));
  batch.facts = {packing_.bucket_of(bucket), decision.reason, decision.rows, packing_.rows_of(batch.sizes)};
  if (!fill(place, batch)) return;
  metrics_.batch_started(batch.facts);
  ++inflight_;
  wake_at(batch.since_ns + pool_.patience().count());
  Slots& slots = slots_[place.worker];
  slots.held[place.slot] = std::move(batch);
  slots.next = 1 - slots.next;
  pool_.ring(place.worker);
}

// Writes a batch into a slot and makes the slot ready; false if no variant runs such sizes, or memory is short.
bool Batcher::fill(Place place, Batch& batch) {
  Arena& arena = pool_.arena(place.worker);
  const auto variant = lookup_.variant(batch.sizes);
  if (!variant) {
    for (const Waiting& request : batch.requests) end(*request.call, {Code::model, "no variant covers these sizes"});
    return false;
  }
  if (auto room = reserve(arena, place.slot, manifest_.contract, batch.sizes); !room) {
    for (const Waiting& request : batch.requests) end(*request.call, {Code::unavailable, room.error().text});
    return false;
  }
  const std::int64_t begun = now_ns();
  std::int64_t row = 0;
  for (const Waiting& request : batch.requests) {
    packing_.fill(arena, place.slot, batch.sizes,
                  {request.call->inputs, &request.call->dims, request.first_row, request.rows, row});
    row += request.rows;
  }
  packing_.fill_pad_rows(arena, place.slot, batch.sizes, row);
  SlotState& state = arena.slot(place.slot);
  state.variant = static_cast<std::uint32_t>(*variant);
  std::copy(batch.sizes.begin(), batch.sizes.end(), state.dims);
  batch.variant = manifest_.variants[*variant].name;
  batch.since_ns = now_ns();
  batch.filling_ns = batch.since_ns - begun;
  state.begun_ns = 0;
  state.phase.store(SlotPhase::ready, std::memory_order_release);
  return true;
}

// --- batches end

// The worker gets its next batch before the answers to this one are written.
void Batcher::rang(std::size_t worker) {
  Slots& slots = slots_[worker];
  std::array<bool, kSlots> ended{};
  for (int slot = 0; slot < kSlots; ++slot) {
    const SlotPhase phase = pool_.arena(worker).report(slot).phase;
    ended[slot] = slots.held[slot] && (phase == SlotPhase::done || phase == SlotPhase::failed);
    if (ended[slot]) slots.held[slot]->done = true;
  }
  if (!ended[0] && !ended[1]) return;
  for (auto& batch : slots.held) {
    if (batch && !batch->done) batch->since_ns = now_ns();
  }
  dispatch();
  for (const int slot : {slots.next, 1 - slots.next}) {
    if (ended[slot]) finish({worker, slot});
  }
}

// A request's time in the queue ends when the worker begins its batch, not when that was assembled ahead.
void Batcher::note_begin(Place place, Batch& batch) {
  const std::int64_t begun = pool_.arena(place.worker).report(place.slot).begun_ns;
  if (batch.begun || begun == 0) return;
  batch.begun = true;
  for (const Waiting& request : batch.requests) {
    if (request.first_row > 0 || request.retried) continue;
    request.call->queue_ns = std::max<std::int64_t>(0, begun - request.call->arrival_ns);
    metrics_.waited(static_cast<std::uint64_t>(request.call->queue_ns));
  }
}

void Batcher::finish(Place place) {
  Batch batch = std::move(*slots_[place.worker].held[place.slot]);
  note_begin(place, batch);
  if (const Error* why = pool_.spoiled()) {
    slots_[place.worker].held[place.slot].reset();
    --inflight_;
    return withhold(std::move(batch), *why);
  }
  const SlotReport report = pool_.arena(place.worker).report(place.slot);
  const std::int64_t noticed = now_ns();
  if (report.phase == SlotPhase::failed) {
    const Error error{Code::model, pool_.arena(place.worker).error(place.slot)};
    slots_[place.worker].held[place.slot].reset();
    --inflight_;
    if (batch.requests.size() > 1) {
      retry(std::move(batch), true);
    } else {
      end(*batch.requests.front().call, error);
    }
    return schedule();
  }
  const std::int64_t compute_ns = report.ended_ns - report.begun_ns;
  learn(place, batch, report.begun_ns, compute_ns);
  std::int64_t row = 0;
  Answered answered;
  for (const Waiting& request : batch.requests) {
    Call& call = *request.call;
    call.compute_ns += compute_ns;
    if (!call.over && answer(place, batch, request, row)) {
      ++answered.requests;
      answered.rows += static_cast<std::uint64_t>(call.rows);
      answered.queue_ns += static_cast<std::uint64_t>(call.queue_ns);
    }
    row += request.rows;
  }
  metrics_.batch_done(batch.facts, answered, static_cast<std::uint64_t>(batch.filling_ns),
                      static_cast<std::uint64_t>(compute_ns), static_cast<std::uint64_t>(now_ns() - noticed));
  pool_.proved(place.worker);
  slots_[place.worker].held[place.slot].reset();
  --inflight_;
  schedule();
}

void Batcher::withhold(Batch batch, const Error& why) {
  for (const Waiting& request : batch.requests) end(*request.call, why);
  refuse_waiting(why);
}

void Batcher::refuse_waiting(const Error& why) {
  while (!queue_.empty()) {
    const auto call = queue_.front().call;
    end(*call, why);
  }
}

void Batcher::learn(Place place, const Batch& batch, std::int64_t begun_ns, std::int64_t compute_ns) {
  waits_us_.clear();
  for (const Waiting& request : batch.requests) waits_us_.push_back(begun_ns / kMicrosecond - request.arrival_us);
  auto& last = slots_[place.worker].last;
  pace_.finished(batch.formed, compute_ns / kMicrosecond, waits_us_, last);
  last = Ran{batch.formed, compute_ns / kMicrosecond};
}

// True if the call's last outputs were in this batch, and it ended well.
bool Batcher::answer(Place place, const Batch& batch, const Waiting& request, std::int64_t at_row) {
  Call& call = *request.call;
  if (now_ns() >= call.deadline_ns) return end(call, too_late("model")), false;
  if (auto collected = collect(place, batch, request, at_row); !collected) return end(call, collected.error()), false;
  call.rows_left -= request.rows;
  if (call.rows_left > 0) return false;
  call.batch_rows = batch.facts.rows;
  call.bucket = batch.facts.bucket;
  call.variant = batch.variant;
  call.over = true;
  call.finished(nullptr);
  return true;
}

// Puts a request's outputs into its call: views of the slot, or copies if they don't lie there in one piece.
Status Batcher::collect(Place place, const Batch& batch, const Waiting& request, std::int64_t at_row) {
  Call& call = *request.call;
  const std::size_t count = manifest_.contract.outputs.size();
  call.outputs.resize(count);
  call.storage.resize(count);
  const Piece piece{call.inputs, &call.dims, request.first_row, request.rows, at_row};
  std::vector<std::byte> gathered;
  for (std::size_t i = 0; i < count; ++i) {
    const bool whole = request.rows == call.rows;
    auto& storage = whole ? call.storage[i] : gathered;
    auto view = packing_.cut(pool_.arena(place.worker), place.slot, batch.sizes, piece, i, storage);
    if (!view) return view.error();
    if (whole) {
      call.outputs[i] = *std::move(view);
      continue;
    }
    const std::size_t at = packing_.offset_in_output(i, call.dims, request.first_row);
    auto& joined = call.storage[i];
    joined.resize(*bytes_of(manifest_.contract.outputs[i], call.dims));
    std::copy(view->data.begin(), view->data.end(), joined.begin() + static_cast<std::ptrdiff_t>(at));
    call.outputs[i] = {*shape_of(manifest_.contract.outputs[i], call.dims), joined};
  }
  return Done{};
}

// --- workers that die or hang

bool Batcher::died(std::size_t worker) {
  Slots& slots = slots_[worker];
  bool ran = false;
  for (const int slot : {1 - slots.next, slots.next}) {  // what is put back last comes first: the older one
    if (!slots.held[slot]) continue;
    const SlotPhase phase = pool_.arena(worker).report(slot).phase;
    if (phase == SlotPhase::done || phase == SlotPhase::failed) {
      finish({worker, slot});
      continue;
    }
    Batch batch = std::move(*slots.held[slot]);
    note_begin({worker, slot}, batch);
    slots.held[slot].reset();
    --inflight_;
    ran |= phase == SlotPhase::running;
    retry(std::move(batch), phase == SlotPhase::running);
  }
  slots = {};
  if (const Error* why = pool_.spoiled()) refuse_waiting(*why);
  const bool parts = ran && settings_.limit() > 1 && caution_.died(now_ns() / kMicrosecond);
  if (parts) part();
  schedule();
  return parts;
}

// What waits shares no batch.
void Batcher::part() {
  for (Waiting& request : queue_) {
    pace_.left(request.key, request.rows);
    request.key = packing_.lone_key();
    pace_.joined(request.key, request.kind, request.rows);
  }
}

// Back to the head of the queue. Of a batch that failed (blamed) each request is tried once more, by itself.
void Batcher::retry(Batch batch, bool blamed) {
  for (auto request = batch.requests.rbegin(); request != batch.requests.rend(); ++request) {
    if (request->call->over) continue;
    if (request->call->cancelled) {
      end(*request->call, {Code::unavailable, "nobody waits for the answer any more"});
      continue;
    }
    if (blamed && request->retried) {
      end(*request->call, {Code::model, "the model's process ended while it ran this request, twice"});
      continue;
    }
    if (blamed) {
      request->retried = true;
      request->key = packing_.lone_key();
    }
    pace_.joined(request->key, request->kind, request->rows);
    shares_.rejoin(request->call->client, request->rows);
    queue_.push_front(std::move(*request));
  }
}

void Batcher::wake_at(std::int64_t at_ns) {
  if (timer_ns_ != 0 && timer_ns_ <= at_ns) return;
  timer_ns_ = at_ns;
  timer_.expires_at(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns)));
  timer_.async_wait(guard_([this](boost::system::error_code ec) {
    if (!ec) on_timer();
  }));
}

void Batcher::on_timer() {
  timer_ns_ = 0;
  dispatch();
  for (std::size_t worker = 0; worker < slots_.size(); ++worker) watch(worker, now_ns());
}

// Answers what is past its deadline; true if somebody still waits for the batch.
bool Batcher::expire_running(Place place, Batch& batch, std::int64_t now) {
  note_begin(place, batch);
  bool wanted = false;
  for (const Waiting& request : batch.requests) {
    if (request.call->deadline_ns <= now) end(*request.call, too_late("model"));
    if (request.call->over) continue;
    wanted = true;
    wake_at(request.call->deadline_ns);
  }
  return wanted;
}

// A worker that runs a batch for too long, or for longer than anyone waits and any batch takes, is replaced.
void Batcher::watch(std::size_t worker, std::int64_t now) {
  Slots& slots = slots_[worker];
  for (const int slot : {1 - slots.next, slots.next}) {
    auto& batch = slots.held[slot];
    if (!batch || batch->done) continue;
    const bool wanted = expire_running({worker, slot}, *batch, now);
    if (!runs_first(slots, slot)) continue;
    const auto most = wanted ? worker_timeout_ : std::min(worker_timeout_, pool_.patience());
    if (now - batch->since_ns >= most.count()) return pool_.kill(worker, "stuck");
    wake_at(batch->since_ns + most.count());
  }
}

}  // namespace mctl
