// The part of Boost.Asio that is compiled once for all files.
#include <boost/asio/impl/src.hpp>
