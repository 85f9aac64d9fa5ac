#include "doors/server.h"

#include <algorithm>
#include <ctime>
#include <vector>

namespace mctl {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::milliseconds kSweep{100};
constexpr std::chrono::milliseconds kNoDescriptors{50};  // pause when there are none left, or no memory
constexpr std::size_t kTurnedAway = 64;                  // connections over the limit that still get an answer

}  // namespace

Server::Server(asio::io_context& io, HttpLimits limits, Service& service) : io_(io), acceptor_(io), timer_(io) {
  shared_->limits = limits;
  shared_->service = &service;
}

Status Server::listen(const std::string& host, std::uint16_t port) {
  error_code ec;
  const auto found = tcp::resolver(io_).resolve(host, std::to_string(port), tcp::resolver::passive, ec);
  if (ec || found.empty()) return Error{Code::host, "no such address: `" + host + "`"};
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), ec);
  if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor_.bind(endpoint, ec);
  if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
  if (ec) {
    const std::string why = ec == asio::error::address_in_use ? "another program listens there" : ec.message();
    return Error{Code::host, "cannot listen on " + host + ":" + std::to_string(port) + ": " + why};
  }
  accept();
  sweep();
  return Done{};
}

std::string Server::url() const {
  const tcp::endpoint endpoint = acceptor_.local_endpoint();
  const std::string address = endpoint.address().to_string();
  return "http://" + (endpoint.address().is_v6() ? "[" + address + "]" : address) + ":" +
         std::to_string(endpoint.port());
}

bool Server::quiet() const {
  return std::none_of(shared_->connections.begin(), shared_->connections.end(),
                      [](const auto* c) { return c->busy(); });
}

void Server::accept() {
  acceptor_.async_accept([this](error_code ec, tcp::socket socket) {
    if (!ec) admit(std::move(socket));
    if (ec && ec != asio::error::connection_aborted) {
      auto pause = std::make_shared<asio::steady_timer>(io_, kNoDescriptors);
      return pause->async_wait([this, pause](error_code) { accept(); });
    }
    accept();
  });
}

void Server::admit(tcp::socket socket) {
  error_code ec;
  socket.non_blocking(true, ec);
  if (!ec) socket.set_option(tcp::no_delay(true), ec);
  const std::size_t most = shared_->limits.max_connections, now = shared_->connections.size();
  if (ec || now >= most + kTurnedAway) return;
  const auto connection = std::make_shared<Connection>(std::move(socket), shared_);
  return now < most ? connection->start() : connection->turn_away({Code::unavailable, "too many connections"});
}

// Times are kept to a tenth of a second, so that no timer has to be set for each request.
void Server::sweep() {
  shared_->date = http_date(std::time(nullptr));
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Connection>> late;
  for (Connection* connection : shared_->connections) {
    if (connection->late(now)) late.push_back(connection->shared_from_this());
  }
  for (const auto& connection : late) connection->time_out();
  timer_.expires_after(kSweep);
  timer_.async_wait([this](error_code ec) {
    if (!ec) sweep();
  });
}

}  // namespace mctl
