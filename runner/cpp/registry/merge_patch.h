// JSON Merge Patch (RFC 7396): a change of a document, written as the part that changes; null takes away.
#pragma once

#include <boost/json.hpp>

namespace mctl {

boost::json::value merged(const boost::json::value& target, const boost::json::value& patch);

// The patch that makes `after` of `before`: what an event tells of a change. Exact where `after` holds no null.
boost::json::value merge_difference(const boost::json::value& before, const boost::json::value& after);

}  // namespace mctl
