#include "engine/policy.h"

#include <algorithm>
#include <unordered_map>

#include "format/lookup.h"

namespace mctl {
namespace {

struct Candidate {
  std::vector<std::size_t> requests;
  std::int64_t rows = 0;
  bool full = false;
  std::int64_t oldest_us = 0;  // arrival
};

// Each key's next batch, the key that is first in the queue first (rule 5).
std::vector<Candidate> candidates(std::int64_t limit, const Queue& queue) {
  std::vector<Candidate> found;
  std::unordered_map<std::string_view, std::size_t> places;
  for (std::size_t index = 0; index < queue.size(); ++index) {
    const Waiting& request = queue[index];
    const auto [place, added] = places.try_emplace(request.key, found.size());
    if (added) found.push_back({{}, 0, false, request.arrival_us});
    Candidate& mine = found[place->second];
    if (mine.full) continue;
    if (mine.requests.empty() || mine.rows + request.rows <= limit) {
      mine.requests.push_back(index);
      mine.oldest_us = std::min(mine.oldest_us, request.arrival_us);
      mine.rows += request.rows;
      mine.full = mine.rows >= limit;
    } else {
      mine.full = true;
    }
  }
  return found;
}

}  // namespace

std::int64_t BatchSettings::limit() const {
  return allowed_batch_sizes.empty() ? max_batch_size : std::min(max_batch_size, allowed_batch_sizes.back());
}

std::int64_t BatchSettings::bucket(std::int64_t rows) const { return bucket_of(rows, allowed_batch_sizes); }

std::int64_t BatchSettings::padded(std::int64_t rows) const {
  return mctl::padded(rows, allowed_batch_sizes, unpadded_sizes);
}

std::string_view name_of(Reason reason) {
  constexpr std::string_view names[] = {"full", "delay", "idle", "drain"};
  return names[static_cast<std::size_t>(reason)];
}

void enqueue(Queue& queue, Waiting request) {
  const auto before = [&](const Waiting& other) { return other.turn <= request.turn; };
  const auto last = std::find_if(queue.rbegin(), queue.rend(), before);
  queue.insert(last.base(), std::move(request));
}

std::shared_ptr<Call> last_of(const Queue& queue, Client client) {
  const auto gives_way = [&](const Waiting& request) { return request.client == client && !request.retried; };
  const auto last = std::find_if(queue.rbegin(), queue.rend(), gives_way);
  return last == queue.rend() ? nullptr : last->call;
}

std::vector<Waiting> take_expired(Queue& queue, std::int64_t now_us) {
  const auto expired = [&](const Waiting& request) { return request.deadline_us <= now_us; };
  std::vector<Waiting> taken;
  if (std::none_of(queue.begin(), queue.end(), expired)) return taken;
  const auto rest = std::stable_partition(queue.begin(), queue.end(), [&](const Waiting& w) { return !expired(w); });
  std::move(rest, queue.end(), std::back_inserter(taken));
  queue.erase(rest, queue.end());
  return taken;
}

Decision decide(const BatchSettings& settings, std::int64_t limit, const Queue& queue, std::int64_t now_us, Room room,
                bool draining) {
  Decision decision;
  const auto wake_at = [&](std::int64_t at) { decision.wake_us = std::min(decision.wake_us.value_or(at), at); };
  if (room != Room::none) {
    for (Candidate& candidate : candidates(limit, queue)) {
      const std::int64_t opens = candidate.oldest_us + settings.max_queue_delay_us;
      const bool waited = room == Room::free && opens <= now_us;
      if (candidate.full || draining || waited) {
        decision.batch = std::move(candidate.requests);
        decision.rows = candidate.rows;
        decision.reason = candidate.full                     ? Reason::full
                          : draining                         ? Reason::drain
                          : settings.max_queue_delay_us == 0 ? Reason::idle
                                                             : Reason::delay;
        decision.wake_us.reset();
        return decision;
      }
      if (room == Room::free) wake_at(opens);
    }
  }
  for (const Waiting& request : queue) wake_at(request.deadline_us);
  return decision;
}

}  // namespace mctl
