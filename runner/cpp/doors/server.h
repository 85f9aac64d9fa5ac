// The listening socket and its connections.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>

#include "doors/connection.h"
#include "format/result.h"

namespace mctl {

class Server {
 public:
  Server(boost::asio::io_context& io, HttpLimits limits, Service& service);

  Status listen(const std::string& host, std::uint16_t port);  // Code::host with the reason
  std::string url() const;
  bool on_loopback() const { return acceptor_.local_endpoint().address().is_loopback(); }
  void allow_only(Hosts hosts) { shared_->hosts = std::move(hosts); }

  void drain() { shared_->draining = true; }  // answers close their connections from now on
  bool quiet() const;                         // nothing is being answered
  void go_on();                               // with what a lack of memory interrupted

 private:
  void accept();
  void pause();
  void welcome(boost::asio::ip::tcp::socket socket);
  Connection::Place place_for(std::uint64_t client);
  void sweep();
  void give_back();

  boost::asio::io_context& io_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer timer_, pause_;
  bool accepting_ = false, sweeping_ = false;
  std::shared_ptr<Shared> shared_;
  std::size_t most_held_ = 0;  // by clients, since memory was given back last
};

}  // namespace mctl
