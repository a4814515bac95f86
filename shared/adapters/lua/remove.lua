-- ARGV: ids. Returns those removed; claimed entries stay.
local removed = {}
for _, id in ipairs(ARGV) do
  local entry = redis.call('HGET', ENTRIES, id)
  if entry and state_of(entry) ~= 'c' then
    forget(id, entry)
    removed[#removed + 1] = id
  end
end
return removed
