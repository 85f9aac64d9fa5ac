// One client: reads requests, has them answered one after the other, and keeps the limits on size and time.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>

#include "doors/http.h"
#include "format/result.h"

namespace mctl {

class Connection;
using Clock = std::chrono::steady_clock;

struct HttpLimits {
  std::size_t max_body = 64 << 20, max_header = 64 << 10;  // bytes
  std::size_t max_held = 1 << 30;                          // bytes of large requests, of all connections together
  std::size_t max_connections = 1024;
  std::chrono::seconds idle{60};  // without a request; also for sending one, and for taking an answer
};

// What answers requests.
class Service {
 public:
  virtual ~Service() = default;
  // Leads to one respond(), now or later.
  virtual void serve(const std::shared_ptr<Connection>& connection) = 0;
  // The client went away before the answer to the request in hand; true if an answer comes all the same.
  virtual bool gone(Connection& connection) = 0;
  // Asked when the head of a request is there and its body would cost much: an error refuses it at once.
  virtual Status screen(const Connection& connection) = 0;
  // The answer to a request that is refused before it is complete.
  virtual Answer refuse(const Connection& connection, const Error& error) = 0;
};

// What connections of a server share.
struct Shared {
  HttpLimits limits;
  Service* service = nullptr;
  std::unordered_set<Connection*> connections;  // all that exist
  std::size_t held = 0;                         // bytes of large requests
  bool draining = false;                        // answers close their connections
  std::string date;                             // for the Date line, kept by the server
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(boost::asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared);
  ~Connection();

  void start();
  void turn_away(const Error& error);  // answers before anything is read, and closes

  std::uint64_t client() const;  // the same for all connections from one place
  std::string address() const;   // ADDRESS:PORT
  const Head& head() const { return parser_->request(); }
  std::span<const std::byte> body() const;
  // Keeps the body's bytes where they are, for as long as what is returned lives: once, and body() is empty then.
  std::shared_ptr<const void> take_body();
  Clock::time_point begun() const { return begun_; }  // when the request was complete
  void respond(Answer answer);
  std::weak_ptr<void> context;  // the service's, for the request in hand

  bool gone() const { return peer_closed_ || state_ == State::closed; }  // it sends nothing more
  bool late(Clock::time_point now) const { return now >= deadline_ && state_ != State::serving; }
  void time_out();
  void close();
  bool busy() const { return state_ == State::serving || state_ == State::writing; }

 private:
  enum class State { reading, serving, writing, lingering, closed };

  void wait();
  void on_readable(boost::beast::error_code ec);
  void on_data(std::size_t count);
  void on_end();
  void advance();
  bool step();
  void on_head();
  bool make_room();
  void grow(std::size_t capacity);
  void request_complete();
  void refuse(const Error& error);
  void write();
  void on_written(boost::beast::error_code ec, std::size_t count);
  void written();
  void next_request();
  void linger();
  void hold(std::size_t bytes);
  void allow(std::size_t bytes = 0);

  boost::asio::ip::tcp::socket socket_;
  const boost::asio::ip::tcp::endpoint peer_;
  std::shared_ptr<Shared> shared_;
  std::optional<RequestParser> parser_;
  State state_ = State::reading;
  bool waiting_ = false, head_done_ = false, keep_alive_ = true, peer_closed_ = false;

  // The bytes of the request in hand, and of what came after it: [0, parsed_) are parsed, [parsed_, filled_) are not.
  std::unique_ptr<char[]> buffer_;
  std::size_t capacity_ = 0, parsed_ = 0, filled_ = 0, body_at_ = 0;
  std::size_t held_ = 0;

  std::string out_head_, out_body_;
  Clock::time_point begun_, deadline_;
};

}  // namespace mctl
