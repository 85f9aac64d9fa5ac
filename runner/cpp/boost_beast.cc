// The part of Boost.Beast that is compiled once for all files.
#include <boost/beast/src.hpp>
