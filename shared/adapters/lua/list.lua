-- ARGV: state, limit (0: all). Returns [id, entry, id, entry, ...] in the order of its index.
local found = {}
for _, member in ipairs(redis.call('ZRANGE', INDEX_OF[ARGV[1]], 0, ARGV[2] - 1)) do
  local id = id_of(member)
  local entry = redis.call('HGET', ENTRIES, id)
  if entry then
    found[#found + 1] = id
    found[#found + 1] = entry
  end
end
return as_json(found)
