-- ARGV: now, limit. Expired claims wait again at their old place under the next attempt, which
-- fences the claimer that let its lease run out. Returns [id, entry, id, entry, ...].
local reclaimed = {}
local expired = redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(expired) do
  local id = id_of(member)
  local entry = redis.call('HGET', ENTRIES, id)
  if entry then
    local attempt = string.format('%010d', tonumber(string.sub(entry, 40, 49)) + 1)
    local next_entry = string.sub(entry, 1, 39) .. attempt .. string.sub(entry, 50)
    reclaimed[#reclaimed + 1] = id
    reclaimed[#reclaimed + 1] = move(id, next_entry, 'w', score_of(entry))
  else
    redis.call('ZREM', CLAIMED, member)
  end
end
return as_json(reclaimed)
