#include "doors/event_stream.h"

#include <string>
#include <utility>

#include "doors/http.h"

namespace mctl {
namespace {

// JSON has no line's end in it.
std::string text_of(const Event& event) {
  return "id: " + std::to_string(event.id) + "\ndata: " + boost::json::serialize(event_to_json(event)) + "\n\n";
}

}  // namespace

struct EventStreams::Stream final : Exchange, std::enable_shared_from_this<EventStreams::Stream> {
  Stream(EventStreams& owner, std::shared_ptr<Connection> to) : streams(owner), connection(std::move(to)) {}

  void send(const Event& event) {
    const std::string text = text_of(event);
    connection->send_part(std::as_bytes(std::span(text)));
  }
  bool gone() override {
    streams.streams_.erase(shared_from_this());
    return false;
  }

  EventStreams& streams;
  const std::shared_ptr<Connection> connection;
  std::shared_ptr<const void> ear;
};

void EventStreams::begin(const std::shared_ptr<Connection>& connection, std::uint64_t after) {
  const auto stream = *streams_.insert(std::make_shared<Stream>(*this, connection)).first;
  connection->context = stream;
  Answer answer;
  answer.type = "text/event-stream";
  answer.fields = "Cache-Control: no-store\r\n";
  connection->begin_stream(std::move(answer));
  for (const Event& event : events_.kept())
    if (event.id > after) stream->send(event);
  stream->ear = events_.listen([to = std::weak_ptr(stream)](const Event& event) {
    if (const auto hears = to.lock()) hears->send(event);
  });
}

void EventStreams::end() {
  for (const auto& stream : std::exchange(streams_, {})) stream->connection->end_stream(true);
}

}  // namespace mctl
